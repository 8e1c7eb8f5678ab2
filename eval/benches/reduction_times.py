"""What reducing costs beside what it saves: the reducer, the embedded engine's prefill and a peer, case by case.

For every case, one after the other, so that a busy machine is busy for all of them: the unreduced prompt is prefilled
by the embedded engine (no prefix cache, one output token), the passages are reduced with no vector cached and again
with all of them cached, and the peer compresses the same passages to a tenth.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.chat_template import ChatTokenizer
from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.outputs import GenerateRequest
from engine.sampling_params import SamplingParams
from eval.baselines import with_title
from eval.benches.passages import passages_of
from eval.compressor_process import CompressorProcess
from eval.intervals import percentile
from eval.prompts import case_messages
from eval.samples import Case
from eval.scoring import SearchText, answer_score
from reducer.config import ReducerConfig
from reducer.encoder import SentenceTransformerEncoder
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller, PromptParts

PEER_SHARE = 0.10


class CaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One case; seconds."""

    id: str
    prompt_tokens: int
    """Of the unreduced prompt."""
    reduced_tokens: int
    prefill_s: float
    cold_s: float
    cached_s: float
    peer_s: float | None
    peer_tokens: int | None
    peer_recall: float | None
    """Whether the peer's prompt states the answer."""
    own_recall: float
    """The same for the reducer at the peer's budget."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """All cases; shares are medians over the cases of time over prefill time of the same case."""

    num_cases: int
    prompt_tokens_median: float
    prefill_s_median: float
    cold_share_median: float
    cached_share_median: float
    peer: str | None
    peer_over_cold_median: float | None
    """How many times longer the peer took than the reducer with nothing cached."""
    peer_recall: float | None
    own_recall: float
    cases: list[CaseTimes]


def make_peer(python: Path, model: Path, num_threads: int) -> CompressorProcess:
    """LongLLMLingua in its own environment."""
    return CompressorProcess(python, "longllmlingua.py", [str(model), "--threads", str(num_threads)])


class Stopwatch:
    """Times one case after the other on models that are loaded once."""

    def __init__(
        self, counter: ChatTokenizer, encoder: SentenceTransformerEncoder, peer: CompressorProcess | None
    ) -> None:
        self._counter = counter
        self._encoder = encoder
        self._reducer = Reducer(ReducerConfig(), counter, encoder)
        self._engine = LLMEngine.from_config(EngineConfig())
        self._peer = peer
        self._num_prefills = 0

    def measure(self, cases: Sequence[Case]) -> Times:
        """Time all cases; the first one is run once before it counts, to warm everything up."""
        self._measure(cases[0], None)
        measured = [self._measure(case, self._peer) for case in cases]
        peers = [item for item in measured if item.peer_s is not None]
        return Times(
            num_cases=len(measured),
            prompt_tokens_median=percentile([float(item.prompt_tokens) for item in measured], 0.5),
            prefill_s_median=percentile([item.prefill_s for item in measured], 0.5),
            cold_share_median=percentile([item.cold_s / item.prefill_s for item in measured], 0.5),
            cached_share_median=percentile([item.cached_s / item.prefill_s for item in measured], 0.5),
            peer=None if self._peer is None else f"LongLLMLingua (llmlingua {self._peer.version})",
            peer_over_cold_median=percentile([(item.peer_s or 0.0) / item.cold_s for item in peers], 0.5)
            if peers
            else None,
            peer_recall=float(np.mean([item.peer_recall for item in peers])) if peers else None,
            own_recall=float(np.mean([item.own_recall for item in measured])),
            cases=measured,
        )

    def _measure(self, case: Case, peer: CompressorProcess | None) -> CaseTimes:
        parts = PromptParts(messages=tuple(case_messages(case)), passages=passages_of(case))
        everything = self._reducer.reduce(parts, budget=Budget(10**6, "window"), caller=Caller(), bypass=True)
        prefill_s = self._prefill(everything.messages)
        self._encoder.cache.clear()
        cold_s, free = self._reduce(parts, 10**6)
        cached_s, _ = self._reduce(parts, 10**6)
        fixed = self._counter.count_prompt(list(parts.messages))
        room = int(PEER_SHARE * (everything.prompt_tokens - fixed))
        _, own = self._reduce(parts, fixed + room)
        found = None
        if peer is not None:
            found = peer.compress(case.question, [with_title(chunk) for chunk in case.chunks], room)
        return CaseTimes(
            id=case.id,
            prompt_tokens=everything.prompt_tokens,
            reduced_tokens=free.prompt_tokens,
            prefill_s=prefill_s,
            cold_s=cold_s,
            cached_s=cached_s,
            peer_s=None if found is None else found["seconds"],
            peer_tokens=None if found is None else found["num_tokens"],
            peer_recall=None if found is None else answer_score(case, SearchText(found["text"])),
            own_recall=answer_score(case, SearchText(str(own.messages[-1]["content"]))),
        )

    def _reduce(self, parts: PromptParts, max_tokens: int) -> tuple[float, Any]:
        started = time.perf_counter()
        result = self._reducer.reduce(parts, budget=Budget(max_tokens, "request"), caller=Caller())
        return time.perf_counter() - started, result

    def _prefill(self, messages: Sequence[dict[str, Any]]) -> float:
        """Seconds from the request to the first token; every prompt has a salt of its own, so nothing is cached."""
        self._num_prefills += 1
        request = GenerateRequest(
            request_id=f"prefill-{self._num_prefills}",
            prompt_token_ids=self._counter.encode_chat(list(messages)),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            cache_salt=f"bench-{self._num_prefills}",
        )
        started = time.perf_counter()
        self._engine.add_request(request)
        while self._engine.has_unfinished:
            for output in self._engine.step():
                if output.finish_reason == "error":
                    raise RuntimeError(f"prefill of {len(request.prompt_token_ids)} tokens failed: {output.error}")
        return time.perf_counter() - started
