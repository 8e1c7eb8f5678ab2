"""Selection: which passages go into the prompt, whole or cut to sentences, within an allowance of tokens.

Noise leaves first, judged by the shape of this request's scores and so even when budget is free. Then passages enter
by gain per token, whole where they fit; one that does not fit whole any more is cut to its best sentences.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reducer.config import SelectionConfig
from reducer.passage_extracts import Extractor
from reducer.stage import Candidate, Filtered, Selected, whole_spans

LENGTH_DAMPING = 0.4
"""Exponent of a passage's length in its gain per token; 0 would ignore length, 1 would take short ones only."""
MIN_COSTED_TOKENS = 30
"""A shorter passage gains nothing more by being short."""


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The passages worth their tokens."""

    candidates: tuple[Candidate, ...]
    """In the order in which they enter the prompt: the best one, then by gain per token."""
    filtered: tuple[Filtered, ...]
    threshold: float
    """Score from which a passage is relevant; one below it is on the list because few are better."""


@dataclass(frozen=True, slots=True)
class SelectionOutcome:
    """What goes into the prompt, best first, and what does not."""

    selected: tuple[Selected, ...]
    filtered: tuple[Filtered, ...]
    is_budget_bound: bool
    """Whether more tokens would have kept more."""
    degraded: str | None = None


def select(
    shortlist: Shortlist, allowance: int, num_block_tokens: int, extractor: Extractor, min_trimmed_tokens: int
) -> SelectionOutcome:
    """Fit a shortlist into ``allowance`` tokens; ``num_block_tokens`` is what the empty documents block costs."""
    left = allowance - num_block_tokens
    selected: list[Selected] = []
    filtered: list[Filtered] = []
    is_bound = False
    for candidate in shortlist.candidates:
        overhead = cost(candidate) - candidate.num_tokens
        if cost(candidate) <= left:
            is_relevant = (candidate.score or 0.0) >= shortlist.threshold
            reason = "relevant" if is_relevant else "among the best passages"
            selected.append(Selected(candidate, whole_spans(candidate.passage.text), candidate.num_tokens, reason))
            left -= cost(candidate)
            continue
        is_bound = True
        extract = None
        if left - overhead >= min_trimmed_tokens:
            extract = extractor.extract(candidate, left - overhead)
        if extract is None:
            filtered.append(Filtered(candidate, "dropped", "budget"))
            continue
        selected.append(Selected(candidate, extract.spans, extract.num_tokens, "cut to its best sentences by budget"))
        left -= extract.num_tokens + overhead
    return SelectionOutcome(tuple(selected), tuple(filtered), is_bound, extractor.degraded)


def shortlist(
    ranked: Sequence[Candidate],
    allowance: int,
    config: SelectionConfig,
    rerank: Callable[[Sequence[Candidate]], Sequence[Candidate]],
) -> Shortlist:
    """Drop noise from candidates sorted best first.

    With all passages fitting into ``allowance`` tokens this goes on until what is left has no noise by its own measure:
    without the noise the scores of the others shift a little, and one of them may turn out to be noise beside the rest.
    So ``rerank`` scores what is left again, and the outcome of a reduction stays as it is when it is reduced again.
    """
    filtered = [Filtered(candidate, "dropped", "empty") for candidate in ranked if not candidate.passage.text.strip()]
    left = [candidate for candidate in ranked if candidate.passage.text.strip()]
    top_k = len(left) if config.top_k is None else config.top_k
    filtered.extend(Filtered(candidate, "dropped", f"beyond top_k {top_k}") for candidate in left[top_k:])
    left = left[:top_k]
    freedom = budget_freedom(left, allowance)
    while True:
        threshold = noise_threshold(left, config)
        relevant, noise = drop_noise(left, threshold, freedom, config)
        filtered.extend(noise)
        if not noise or freedom < 1.0:
            return Shortlist(tuple(relevant), tuple(filtered), threshold)
        left = list(rerank(relevant))


def budget_freedom(candidates: Sequence[Candidate], allowance: int) -> float:
    """How much the noise limits count: 1 when all passages fit, less the more the budget cuts by itself.

    A tight budget is there to be spent: with half of the passages fitting, a sixteenth of the threshold is left.
    """
    total = sum(cost(candidate) for candidate in candidates)
    return min(1.0, max(allowance, 0) / total) ** 4 if total > 0 else 1.0


def by_gain_per_token(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The best passage, then the others by score per token, dampened: one twice as long must score a third higher."""

    def gain(candidate: Candidate) -> float:
        num_tokens = max(candidate.num_tokens + candidate.num_label_tokens, MIN_COSTED_TOKENS)
        return (candidate.score or 0.0) / math.pow(num_tokens, LENGTH_DAMPING)

    return [*ranked[:1], *sorted(ranked[1:], key=lambda candidate: (-gain(candidate), candidate.position))]


def noise_threshold(ranked: Sequence[Candidate], config: SelectionConfig) -> float:
    """The score below which a passage is noise, for candidates sorted best first.

    The second best score is the measure: the best one may stand far above all others.
    """
    if len(ranked) < 2:
        return 0.0
    measure = ranked[1].score or 0.0
    is_chain = any(candidate.is_linked for candidate in ranked)
    return (config.linked_threshold if is_chain else config.relative_threshold) * measure


def drop_noise(
    ranked: Sequence[Candidate], threshold: float, freedom: float, config: SelectionConfig
) -> tuple[list[Candidate], list[Filtered]]:
    """Split candidates, best first, into those worth their tokens, by gain per token, and the rest with the reasons."""
    threshold *= freedom
    lowest = freedom * config.min_passages_threshold * (ranked[1].score or 0.0) if len(ranked) > 1 else 0.0
    relevant: list[Candidate] = []
    noise: list[Filtered] = []
    for candidate in by_gain_per_token(ranked):
        score = candidate.score or 0.0
        needed = min(lowest, threshold) if len(relevant) < config.min_passages else threshold
        if score < needed:
            noise.append(Filtered(candidate, "dropped", f"score {score:.2f} below threshold {needed:.2f}"))
            continue
        relevant.append(candidate)
    return relevant, noise


def cost(candidate: Candidate) -> int:
    """Tokens of a whole passage in the prompt: text, label, title, line break."""
    return candidate.num_tokens + candidate.num_label_tokens + 1
