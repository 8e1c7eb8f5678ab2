"""The scheduler under load: gaps beside a long prompt, policies, prefix reuse, its own cost, and a thousand cancels.

    python -m eval.benches.bench_scheduling DATA_FOLDER --output eval/results/scheduling.json

1. Streams beside one long prompt, with the real model: the largest gap between two tokens of a stream, and the time to
   the first token of the prompt, with chunks and without, alternating.
2. Half of a code-completion trace under the three policies. A second of this machine reads a few hundred tokens, the
   trace was served by a cluster: so time is simulated with the step costs that part 1 has just measured here, and the
   arrivals are stretched until this machine is busy for a given share of the time.
3. Prefix reuse of scheduler and block pool alone on two traces, against an unlimited cache and against plain LRU.
4. Time of the control plane per step, up to a thousand sequences, and its share of a real step of 64 streams.
5. A thousand requests that are cancelled at random, at every stage.
"""

import sys
from pathlib import Path

import click
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from engine.config import AdmissionConfig, PolicyName, SchedulerConfig
from engine.cost_model import CostCoefficients
from engine.kv_cache_manager import KVCacheManager
from engine.lengths import length_bucket
from engine.memory import free_memory_bytes
from engine.outputs import ModelInfo
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_output import SchedulerOutput
from engine.sequence import Sequence
from eval.benches.scheduling_control import measure_control_plane, measure_random_cancels
from eval.benches.scheduling_model import Machine, measure_decode_step_s, measure_long_prefill
from eval.benches.scheduling_records import MixedTrace, PolicyResult, PrefixTrace, SchedulingReport
from eval.benches.trace_simulation import (
    FixedCostModel,
    Trace,
    make_cache_key,
    num_distinct_blocks,
    plain_lru_hit_share,
    read_trace,
    replay,
    replay_prefixes,
    step_seconds,
    unlimited_hit_share,
)
from eval.datasets import Dataset
from eval.errors import EvalError
from eval.intervals import percentile
from eval.manifest import DataFile, make_manifest
from eval.records import encode_report

MIXED_TRACE = "trace-azure-code.jsonl.gz"
PREFIX_TRACES = ("trace-mooncake-conversation.jsonl.gz", "trace-agent-magagent.jsonl.gz")
POLICIES: tuple[PolicyName, ...] = ("token_budget", "fixed_count", "length_bucket")
BYTES_PER_VALUE = {"fp32": 4, "bf16": 2, "fp16": 2}


def measure_mixed_trace(
    trace: Trace, coefficients: CostCoefficients, info: ModelInfo, utilisation: float
) -> MixedTrace:
    """Half of the trace, every second request, under the three policies in simulated time."""
    requests = [request for request in trace.requests[::2] if request.input_tokens + 1 < info.max_model_len]
    cost_model = FixedCostModel(coefficients, SchedulerConfig().max_chunk_tokens)
    busy_s = sum(
        (cost_model.predict_s(request.input_tokens, 0) or 0.0) + request.output_tokens * coefficients.step_s
        for request in requests
    )
    scale = busy_s / utilisation / (requests[-1].t - requests[0].t)
    activation_bytes = activation_bytes_per_token(info)
    limit = free_memory_bytes()
    policies = []
    for policy in POLICIES:
        sequences = [
            Sequence(
                request_id=str(place),
                prompt_token_ids=[place] * request.input_tokens,
                sampling=SamplingParams(
                    max_tokens=max(1, min(request.output_tokens, info.max_model_len - request.input_tokens))
                ),
                cache_salt="tenant",
                arrival_s=request.t * scale,
            )
            for place, request in enumerate(requests)
        ]
        policies.append(_run_policy(policy, sequences, coefficients, info, activation_bytes, limit))
    return MixedTrace(
        trace=trace.name,
        sha256=trace.sha256,
        num_requests=len(requests),
        step_s=coefficients.step_s,
        token_s=coefficients.token_s,
        pair_s=coefficients.pair_s,
        time_scale=scale,
        utilisation=utilisation,
        activation_bytes_per_token=activation_bytes,
        activation_limit_bytes=limit,
        policies=policies,
    )


def activation_bytes_per_token(info: ModelInfo) -> int:
    """Residual, normed, queries, keys, values, attention output, gate and up: what one layer keeps of a token."""
    q_size, kv_size = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    values = 2 * info.hidden_size + 2 * q_size + 2 * kv_size + 2 * info.intermediate_size
    return values * BYTES_PER_VALUE.get(info.dtype, 4)


def _run_policy(
    policy: PolicyName,
    sequences: list[Sequence],
    coefficients: CostCoefficients,
    info: ModelInfo,
    activation_bytes: int,
    activation_limit: int,
) -> PolicyResult:
    config = SchedulerConfig(policy=policy, max_num_waiting=len(sequences) + 1)
    scheduler = Scheduler(
        config,
        KVCacheManager(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            cache_key=make_cache_key(),
            enable_prefix_caching=False,
        ),
        max_model_len=info.max_model_len,
        cost_model=FixedCostModel(coefficients, config.max_chunk_tokens),
        admission=AdmissionConfig(max_num_waiting_tokens=None),
    )
    gaps: list[tuple[float, int]] = []
    step_tokens: list[int] = []

    def note(output: SchedulerOutput, seconds: float) -> None:
        num_decodes = sum(part.num_output_tokens > 0 and part.num_new_tokens == 1 for part in output.scheduled)
        if num_decodes:
            gaps.append((seconds, num_decodes))
        step_tokens.append(output.num_tokens)

    replay(scheduler, sequences, lambda output: step_seconds(coefficients, output), on_step=note)
    ttfts: dict[str, list[float]] = {}
    for sequence in sequences:
        if sequence.first_token_s is None:
            raise EvalError(f"{policy}: request {sequence.request_id} got no token")
        ttfts.setdefault(length_bucket(sequence.num_prompt_tokens), []).append(
            sequence.first_token_s - sequence.arrival_s
        )
    everything = [value for values in ttfts.values() for value in values]
    weighted = np.repeat([seconds for seconds, _ in gaps], [count for _, count in gaps])
    return PolicyResult(
        policy=policy,
        num_requests=len(sequences),
        num_short=len(ttfts["short"]),
        ttft_s_p50_short=percentile(ttfts["short"], 0.5),
        ttft_s_p95_short=percentile(ttfts["short"], 0.95),
        ttft_s_p50_all=percentile(everything, 0.5),
        ttft_s_p95_all=percentile(everything, 0.95),
        ttft_s_p95_long=percentile(ttfts["long"], 0.95) if "long" in ttfts else None,
        decode_gap_s_p99=float(np.quantile(weighted, 0.99)),
        decode_gap_s_max=float(weighted.max()),
        max_step_tokens=max(step_tokens),
        num_preemptions=scheduler.num_preemptions,
        num_out_of_memory=sum(count * activation_bytes > activation_limit for count in step_tokens),
    )


def measure_prefix_trace(trace: Trace) -> PrefixTrace:
    """Hit shares of scheduler and block pool at full size and at a tenth of it."""
    num_blocks = num_distinct_blocks(trace)
    unlimited = unlimited_hit_share(trace)
    full = replay_prefixes(trace, num_blocks).hit_share
    return PrefixTrace(
        trace=trace.name,
        sha256=trace.sha256,
        num_requests=len(trace.requests),
        num_distinct_blocks=num_blocks,
        unlimited=unlimited,
        full_size=full,
        full_size_gap_points=100 * (unlimited - full),
        tenth=replay_prefixes(trace, num_blocks // 10).hit_share,
        plain_lru_tenth=plain_lru_hit_share(trace, num_blocks // 10, with_outputs=True),
        ideal_prompt_lru_tenth=plain_lru_hit_share(trace, num_blocks // 10, with_outputs=False),
    )


def print_report(console: Console, report: SchedulingReport) -> None:
    """A table for every part."""
    table = Table(title="Scheduling", title_justify="left")
    for heading in ("question", "figure", "wanted"):
        table.add_column(heading)
    if (long := report.long_prefill) is not None:
        table.add_row(
            f"largest gap beside {long.prompt_tokens:,} tokens, chunked / whole",
            f"{long.gap_ratio:.3f} (processor time {long.cpu_gap_ratio:.3f})",
            "≤ 0.2",
        )
        table.add_row(
            "TTFT of the long prompt, chunked / whole",
            f"{long.ttft_ratio:.3f} (processor time {long.cpu_ttft_ratio:.3f})",
            "≤ 1.25",
        )
    if (mixed := report.mixed_trace) is not None:
        for policy in mixed.policies:
            figure = (
                f"{policy.ttft_s_p95_short:.2f} s, gap {policy.decode_gap_s_max:.2f} s, OOM {policy.num_out_of_memory}"
            )
            table.add_row(f"P95 TTFT of short, {policy.policy}", figure, "token_budget lowest, no OOM")
    for prefix in report.prefix_traces:
        table.add_row(
            f"hits at full size, {prefix.trace}", f"{prefix.full_size:.2%} of {prefix.unlimited:.2%}", "≤ 2 points less"
        )
        figure = f"{prefix.tenth:.2%}, LRU {prefix.plain_lru_tenth:.2%}, ideal {prefix.ideal_prompt_lru_tenth:.2%}"
        table.add_row("hits at a tenth of it", figure, "≥ plain LRU")
    if (control := report.control_plane) is not None:
        table.add_row("control plane of a step of 64", f"{control.share_64:.2%}", "≤ 5 %")
        table.add_row("cost per sequence, 1,000 over 100", f"{control.linearity:.2f}", "about 1")
    if (cancels := report.random_cancels) is not None:
        ends = f"{cancels.num_completed} answered, {cancels.num_cancelled} cancelled, {cancels.num_unanswered} lost"
        figure = f"{ends}, {cancels.num_blocks_in_use_at_end} blocks kept"
        table.add_row(f"{cancels.num_requests:,} requests with random cancels", figure, "none lost, 0 blocks")
    console.print(table)


@click.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(min=64), default=6000, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Of the long prompt.")
@click.option("--utilisation", type=click.FloatRange(min=0.05, max=2.0), default=0.5, show_default=True)
@click.option("--requests", "num_requests", type=click.IntRange(min=8), default=1000, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the model; all cores by default.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
def main(
    data: Path,
    model: str,
    prompt_tokens: int,
    rounds: int,
    utilisation: float,
    num_requests: int,
    threads: int | None,
    seed: int,
    output: Path | None,
) -> None:
    """Measure the scheduler; DATA is the folder with the traces."""
    console = Console(stderr=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    try:
        mixed = read_trace(data / MIXED_TRACE)
        prefix_traces = [read_trace(data / name) for name in PREFIX_TRACES]
        console.print("loading the model")
        machine = Machine(model, num_threads=threads, seed=seed)
        console.print("streams beside a long prompt")
        long_prefill, coefficients = measure_long_prefill(
            machine,
            prompt_tokens=prompt_tokens,
            num_streams=4,
            chunk_tokens=SchedulerConfig().max_num_batched_tokens,
            rounds=rounds,
        )
        console.print("control plane")
        control_plane = measure_control_plane(measure_decode_step_s(machine, 64))
        console.print("random cancels")
        cancels = measure_random_cancels(machine, num_requests, seed)
        console.print("policies")
        mixed_result = measure_mixed_trace(mixed, coefficients, machine.runner.info, utilisation)
        console.print("prefix traces")
        prefixes = [measure_prefix_trace(trace) for trace in prefix_traces]
    except EvalError as error:
        raise click.ClickException(str(error)) from None
    manifest = make_manifest(
        dataset=Dataset(name=mixed.name, sha256=mixed.sha256, cases=[], num_cases_in_file=len(mixed.requests)),
        settings={
            "prompt_tokens": prompt_tokens,
            "rounds": rounds,
            "utilisation": utilisation,
            "num_requests": num_requests,
            "threads": threads,
            "scheduler": msgspec.to_builtins(SchedulerConfig()),
        },
        seed=seed,
        model=model,
        max_model_len=machine.runner.max_model_len,
        started_gateway=False,
    )
    data_file = DataFile(
        name=mixed.name,
        sha256=mixed.sha256,
        num_cases=mixed_result.num_requests,
        num_cases_in_file=len(mixed.requests),
    )
    report = SchedulingReport(
        manifest=msgspec.structs.replace(manifest, data=data_file),
        long_prefill=long_prefill,
        mixed_trace=mixed_result,
        prefix_traces=prefixes,
        control_plane=control_plane,
        random_cancels=cancels,
    )
    print_report(console, report)
    if output is not None:
        output.write_bytes(encode_report(report))
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


if __name__ == "__main__":
    main()
