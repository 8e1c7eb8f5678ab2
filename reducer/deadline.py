"""Deadline: a time limit for one reduction, and models that stop when it would be passed.

A stage that cannot finish in time is left out or replaced by its cheaper method, and says so. What remains is always a
prompt within the budget: counting and cutting to the budget are never left out.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from reducer.encoder import Encoder, FloatArray
from reducer.passage_extracts import Extractor
from reducer.reranker import Reranker
from reducer.selection import SelectionOutcome
from reducer.stage import Candidate, Filtered, Selected, whole_spans

FIRST_BATCH = 1
"""Texts embedded before the pace is known; each later batch is twice as large."""


class DeadlineExpiredError(Exception):
    """Work was stopped because it would end after the deadline; the caller falls back to a cheaper method."""


class Deadline:
    """A point in time, or none. ``clock`` returns seconds and never goes back."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        if limit_s is not None and not limit_s >= 0.0:
            raise ValueError(f"deadline_s must be at least 0, got {limit_s}")
        self.limit_s = limit_s
        self._clock = clock
        self._end = None if limit_s is None else clock() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds left; infinity without a limit, negative after it."""
        return float("inf") if self._end is None else self._end - self._clock()

    @property
    def is_expired(self) -> bool:
        """Whether the limit has passed."""
        return self.left_s <= 0.0

    def allows(self, needed_s: float) -> bool:
        """Whether work of ``needed_s`` seconds would end in time."""
        return self.left_s > needed_s

    def elapsed_s(self, since: float) -> float:
        """Seconds since ``since``, a reading of ``now``."""
        return self._clock() - since

    def now(self) -> float:
        """Reading of the clock."""
        return self._clock()

    def __str__(self) -> str:
        return "no deadline" if self.limit_s is None else f"deadline of {self.limit_s * 1000:g} ms"


class DeadlinePace:
    """A model called in growing batches that gives up before a batch that would end too late."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._seconds_per_char = 0.0

    def run(self, texts: Sequence[str], call: Callable[[Sequence[str]], FloatArray]) -> FloatArray:
        """``call`` on all texts, its rows joined. Raises DeadlineExpiredError when time does not suffice."""
        rows: list[FloatArray] = []
        start, size = 0, FIRST_BATCH
        while start < len(texts) or not rows:
            batch = list(texts[start : start + size])
            num_chars = sum(map(len, batch))
            if self._deadline.is_expired or not self._deadline.allows(self._seconds_per_char * num_chars):
                raise DeadlineExpiredError(f"{self._deadline}: {len(texts) - start} texts are not read")
            began = self._deadline.now()
            rows.append(call(batch))
            # The slowest pace seen counts: cached texts cost nothing and say nothing about the others.
            pace = self._deadline.elapsed_s(began) / max(num_chars, 1)
            self._seconds_per_char = max(self._seconds_per_char, pace)
            start, size = start + size, size * 2
        return rows[0] if len(rows) == 1 else np.concatenate(rows)


class DeadlineEncoder:
    """An encoder that gives up before a batch that would end too late."""

    def __init__(self, encoder: Encoder, deadline: Deadline) -> None:
        self._encoder = encoder
        self._pace = DeadlinePace(deadline)

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Embed texts, shape (n, dim), rows of length 1. Raises DeadlineExpiredError when time does not suffice."""
        return self._pace.run(texts, self._encoder.encode)


class DeadlineReranker:
    """A reranker that gives up before a batch that would end too late."""

    def __init__(self, reranker: Reranker, deadline: Deadline) -> None:
        self._reranker = reranker
        self._pace = DeadlinePace(deadline)

    def score(self, question: str, texts: Sequence[str]) -> FloatArray:
        """Relevance of each text, shape (n,). Raises DeadlineExpiredError when time does not suffice."""
        return self._pace.run(texts, lambda batch: self._reranker.score(question, batch))


def select_whole(
    running: Sequence[Candidate], allowance: int, num_block_tokens: int, extractor: Extractor, why: str
) -> SelectionOutcome:
    """Whole passages in the order given while they fit; the first one is cut to sentences if none fits whole.

    ``num_block_tokens`` is what the empty documents block costs, ``why`` the reason for the receipt.
    """
    left = allowance - num_block_tokens
    selected: list[Selected] = []
    filtered: list[Filtered] = []
    for candidate in running:
        overhead = candidate.num_label_tokens + 1
        if not candidate.passage.text.strip():
            filtered.append(Filtered(candidate, "dropped", "empty"))
        elif candidate.num_tokens + overhead <= left:
            selected.append(Selected(candidate, whole_spans(candidate.passage.text), candidate.num_tokens, why))
            left -= candidate.num_tokens + overhead
        else:
            filtered.append(Filtered(candidate, "dropped", "budget"))
    cut = next((gone for gone in filtered if gone.reason == "budget"), None)
    if not selected and cut is not None:
        candidate = cut.candidate
        extract = extractor.extract(candidate, left - candidate.num_label_tokens - 1)
        if extract is not None:
            filtered.remove(cut)
            selected.append(
                Selected(candidate, extract.spans, extract.num_tokens, "cut to its best sentences by budget")
            )
    return SelectionOutcome(tuple(selected), tuple(filtered), cut is not None, why)
