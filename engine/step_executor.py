"""Executes a step so that what goes wrong in one sequence ends that one only.

When a step raises (out of memory, a kernel that refuses one shape), it is not known whose fault it was. Computing the
same tokens into the same blocks again is harmless, so the step is cut in two and each half is tried, down to single
sequences: what fails alone has failed, and half a step needs half the memory::

    [a b c d]  out of memory
    [a b]      fine              [c d]  out of memory
                                 [c] fine    [d] fails alone: only d ends with an error
"""

import logging
from typing import Protocol

from engine.scheduler_output import ModelRunnerOutput, SampledLogprobs, SchedulerOutput

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What executes a step: the model runner, or a fake one in tests of the control plane."""

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens and sample where asked. May raise: then the step counts as not computed."""
        ...


def execute_checked(runner: Runner, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
    """Execute a step; raises as the runner does, and RuntimeError where a sequence has neither token nor error."""
    runner_output = runner.execute(scheduler_output)
    for scheduled in scheduler_output.scheduled:
        is_missing = scheduled.needs_sample and scheduled.request_id not in runner_output.sampled
        if is_missing and scheduled.request_id not in runner_output.failed:
            raise RuntimeError(f"the model runner returned no token for {scheduled.request_id}")
    return runner_output


def execute_in_parts(runner: Runner, scheduler_output: SchedulerOutput, error: Exception) -> ModelRunnerOutput:
    """Execute a step that has raised ``error`` again, in halves; its transfers must have been taken out.

    Never raises: every sequence has a token, needs none, or is in ``failed``.
    """
    scheduled = scheduler_output.scheduled
    if len(scheduled) < 2:
        return ModelRunnerOutput(sampled={}, failed={part.request_id: describe(error) for part in scheduled})
    sampled: dict[str, int] = {}
    failed: dict[str, str] = {}
    logprobs: dict[str, SampledLogprobs] = {}
    poisoned: list[int] = []
    middle = len(scheduled) // 2
    finished = scheduler_output.finished_request_ids
    for part in (SchedulerOutput(scheduled[:middle], finished), SchedulerOutput(scheduled[middle:])):
        try:
            output = execute_checked(runner, part)
        except Exception as part_error:
            logger.warning("a part of %d sequences failed: %s", len(part.scheduled), describe(part_error))
            output = execute_in_parts(runner, part, part_error)
        sampled.update(output.sampled)
        failed.update(output.failed)
        logprobs.update(output.logprobs)
        poisoned.extend(output.poisoned_block_ids)
    return ModelRunnerOutput(sampled=sampled, failed=failed, logprobs=logprobs, poisoned_block_ids=poisoned)


def describe(error: Exception) -> str:
    """Class and text of an error."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
