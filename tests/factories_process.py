"""Engines without a model for tests of the engine process: importable in a spawned process, no torch.

The first prompt token says what a request does; everything else answers ``max_tokens`` tokens, one a step.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ModelError, PromptTooLongError, QueueFullError
from engine.outputs import EngineStats, GenerateRequest, ModelInfo, RequestOutput
from engine.sampling_params import SamplingParams

ANSWER, DIE, BREAK, QUEUE_FULL, TOO_LONG, MALFORMED, ODD, SLEEP, STALL, HOLD = range(10)

FAKE = "factories_process:FakeEngine"
STEP_S = 0.001


class FakeEngine:
    """Answers ``<length of the prompt>,`` first and then ``x`` for each further token."""

    def __init__(self, config: EngineConfig) -> None:
        folder = Path(config.model.model).parent
        if (folder / "broken-model").exists():
            raise ModelError(f"{config.model.model} has a wrong digest")
        if (folder / "exit-at-start").exists():
            os._exit(3)
        if (folder / "slow-start").exists():
            time.sleep(60)
        self.info = ModelInfo(
            model=config.model.model,
            architecture="fake",
            dtype="fp32",
            num_parameters=0,
            max_model_len=1_000_000,
            vocab_size=700,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            hidden_size=1,
            intermediate_size=1,
            block_size=config.cache.block_size,
            num_blocks=1,
            weights_digest="",
            attention_backend="torch" if "torch" in sys.modules else "none",
        )
        self._running: dict[str, tuple[GenerateRequest, int]] = {}
        self.on_started: Callable[[list[str]], None] | None = None
        self._started: set[str] = set()
        self._hold = folder / "hold"
        """While this file exists, requests with ``HOLD`` stay in the queue."""
        self._num_steps = 0
        self._generation_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def add_request(self, request: GenerateRequest) -> None:
        match request.prompt_token_ids[0]:
            case 3:
                raise QueueFullError(17, 2.5)
            case 4:
                raise PromptTooLongError(9000, 8192)
            case 5:
                raise ValueError("token id 999 is outside the vocabulary of 700 ids")
            case 6:
                raise RuntimeError("something odd")
        self._running[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> RequestOutput | None:
        entry = self._running.pop(request_id, None)
        if entry is None:
            return None
        request, num_output_tokens = entry
        return _output(request, "", num_output_tokens, "abort")

    def step(self) -> list[RequestOutput]:
        begun = [
            request_id
            for request_id, (request, _) in self._running.items()
            if request.prompt_token_ids[0] != HOLD or not self._hold.exists()
        ]
        if self.on_started is not None:
            self.on_started([request_id for request_id in begun if request_id not in self._started])
        self._started.update(begun)
        commands = {self._running[request_id][0].prompt_token_ids[0] for request_id in begun}
        if not begun:
            return []
        if DIE in commands:
            os.kill(os.getpid(), signal.SIGKILL)
        if BREAK in commands:
            raise AssertionError("two sequences own block 5")
        if SLEEP in commands:
            time.sleep(60)
        if commands == {STALL}:
            return []
        time.sleep(STEP_S)
        self._num_steps += 1
        outputs = []
        for request_id, (request, num_output_tokens) in list(self._running.items()):
            if request.prompt_token_ids[0] == STALL or request_id not in begun:
                continue
            text = "x" if num_output_tokens else f"{len(request.prompt_token_ids)},"
            num_output_tokens += 1
            self._generation_tokens += 1
            is_last = num_output_tokens == request.sampling.max_tokens
            outputs.append(_output(request, text, num_output_tokens, "length" if is_last else None))
            if is_last:
                del self._running[request_id]
            else:
                self._running[request_id] = (request, num_output_tokens)
        return outputs

    def close(self) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=0,
            kv_cache_usage=0.0,
            prompt_tokens=0,
            cached_prompt_tokens=0,
            generation_tokens=self._generation_tokens,
            num_preemptions=0,
            num_steps=self._num_steps,
        )


def _output(request: GenerateRequest, text: str, num_output_tokens: int, finish_reason: str | None) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        text=text,
        new_token_ids=[1] if text else [],
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=num_output_tokens,
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )


def make_request(
    request_id: str = "r", *, command: int = ANSWER, num_prompt_tokens: int = 3, max_tokens: int = 3
) -> GenerateRequest:
    """A request whose first prompt token is ``command``."""
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=[command] + [1] * (num_prompt_tokens - 1),
        sampling=SamplingParams(max_tokens=max_tokens),
        cache_salt="tenant",
    )
