"""Selection: which passages go into the prompt, whole or cut to sentences, within an allowance of tokens.

Noise leaves first, judged by the shape of this request's scores and so even when budget is free. Then passages enter
by gain per token, whole where they fit; one that does not fit whole any more is cut to its best sentences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reducer.config import SelectionConfig
from reducer.extraction import Extractor
from reducer.stage import Candidate, Filtered, Selected, whole_spans

LENGTH_DAMPING = 0.4
"""Exponent of a passage's length in its gain per token; 0 would ignore length, 1 would take short ones only."""
MIN_COSTED_TOKENS = 30
"""A shorter passage gains nothing more by being short."""
STRONG_SHARE = 0.85
"""Share of the second best score from which a passage is strong."""


@dataclass(frozen=True, slots=True)
class SelectionOutcome:
    """What goes into the prompt, best first, and what does not."""

    selected: tuple[Selected, ...]
    filtered: tuple[Filtered, ...]
    is_budget_bound: bool
    """Whether more tokens would have kept more."""
    degraded: str | None = None


def select(
    ranked: Sequence[Candidate], allowance: int, num_block_tokens: int, config: SelectionConfig, extractor: Extractor
) -> SelectionOutcome:
    """Choose among candidates sorted best first; ``num_block_tokens`` is what the empty documents block costs."""
    left = allowance - num_block_tokens
    relevant, filtered = drop_noise(ranked, noise_limits(ranked, left, config), config)
    selected: list[Selected] = []
    is_bound = False
    for candidate in relevant:
        overhead = candidate.num_label_tokens + 1  # label, title, line break
        if candidate.num_tokens + overhead <= left:
            spans = whole_spans(candidate.passage.text)
            selected.append(Selected(candidate, spans, candidate.num_tokens, "relevant"))
            left -= candidate.num_tokens + overhead
            continue
        is_bound = True
        extract = None
        if left - overhead >= config.min_trimmed_tokens:
            extract = extractor.extract(candidate, left - overhead)
        if extract is None:
            filtered.append(Filtered(candidate, "dropped", "budget"))
            continue
        selected.append(Selected(candidate, extract.spans, extract.num_tokens, "cut to its best sentences by budget"))
        left -= extract.num_tokens + overhead
    return SelectionOutcome(tuple(selected), tuple(filtered), is_bound, extractor.degraded)


def by_gain_per_token(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The best passage, then the others by score per token, dampened: one twice as long must score a third higher."""

    def gain(candidate: Candidate) -> float:
        num_tokens = max(candidate.num_tokens + candidate.num_label_tokens, MIN_COSTED_TOKENS)
        return (candidate.score or 0.0) / math.pow(num_tokens, LENGTH_DAMPING)

    return [*ranked[:1], *sorted(ranked[1:], key=lambda candidate: (-gain(candidate), candidate.position))]


@dataclass(frozen=True, slots=True)
class NoiseLimits:
    """What counts as noise in this request."""

    threshold: float
    """A passage scored lower is noise."""
    strong: float
    """A passage scored as high as this is no noise however many there are."""
    max_tokens: float
    """Tokens after which a passage must be strong."""


def noise_limits(ranked: Sequence[Candidate], allowance: int, config: SelectionConfig) -> NoiseLimits:
    """Limits from the shape of this request's scores, for candidates sorted best first.

    The second best score is the measure: the best one may stand far above all others. The limits count in full when
    every passage would fit. A budget that cuts by itself leaves less to them: with half of the passages fitting, a
    quarter of the threshold is left.
    """
    total = sum(_cost(candidate) for candidate in ranked)
    if len(ranked) < 2 or total <= 0:
        return NoiseLimits(0.0, 0.0, float(total))
    freedom = min(1.0, max(allowance, 0) / total) ** 2
    is_chain = any(candidate.is_linked for candidate in ranked)
    relative = config.linked_threshold if is_chain else config.relative_threshold
    measure = ranked[1].score or 0.0
    return NoiseLimits(
        threshold=relative * freedom * measure,
        strong=STRONG_SHARE * freedom * measure,
        max_tokens=total * (1.0 - (1.0 - config.max_free_share) * freedom),
    )


def drop_noise(
    ranked: Sequence[Candidate], limits: NoiseLimits, config: SelectionConfig
) -> tuple[list[Candidate], list[Filtered]]:
    """Split candidates, best first, into those worth their tokens, by gain per token, and the rest with the reasons."""
    filtered = [Filtered(candidate, "dropped", "empty") for candidate in ranked if not candidate.passage.text.strip()]
    readable = [candidate for candidate in ranked if candidate.passage.text.strip()]
    top_k = len(readable) if config.top_k is None else config.top_k
    filtered.extend(Filtered(candidate, "dropped", f"beyond top_k {top_k}") for candidate in readable[top_k:])
    relevant: list[Candidate] = []
    used = 0
    for candidate in by_gain_per_token(readable[:top_k]):
        score = candidate.score or 0.0
        needed = limits.threshold
        if used + _cost(candidate) > limits.max_tokens:
            needed = max(needed, limits.strong)
        if len(relevant) >= config.min_passages and score < needed:
            wanted = "threshold" if needed <= limits.threshold else "what the last tokens are worth,"
            filtered.append(Filtered(candidate, "dropped", f"score {score:.2f} below {wanted} {needed:.2f}"))
            continue
        relevant.append(candidate)
        used += _cost(candidate)
    return relevant, filtered


def _cost(candidate: Candidate) -> int:
    """Tokens of a passage in the prompt: text, label, title, line break."""
    return candidate.num_tokens + candidate.num_label_tokens + 1
