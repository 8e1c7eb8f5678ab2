"""Selection: which passages go into the prompt, whole or cut to sentences, within an allowance of tokens.

Noise leaves first, judged by the shape of this request's scores and so even when budget is free. Then passages enter
by rank while they fit whole; the first one that does not is cut to its best sentences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from reducer.config import SelectionConfig
from reducer.extraction import Extractor
from reducer.stage import Candidate, Filtered, Selected, whole_spans


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
    relevant, filtered = drop_noise(ranked, config)
    left = allowance - num_block_tokens
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


def drop_noise(ranked: Sequence[Candidate], config: SelectionConfig) -> tuple[list[Candidate], list[Filtered]]:
    """Split candidates, best first, into those worth their tokens and the rest: noise, empty, past ``top_k``."""
    relevant: list[Candidate] = []
    filtered: list[Filtered] = []
    best = max((candidate.score or 0.0 for candidate in ranked), default=0.0)
    threshold = config.relative_threshold * best
    for candidate in ranked:
        score = candidate.score or 0.0
        if not candidate.passage.text.strip():
            filtered.append(Filtered(candidate, "dropped", "empty"))
        elif config.top_k is not None and len(relevant) >= config.top_k:
            filtered.append(Filtered(candidate, "dropped", f"beyond top_k {config.top_k}"))
        elif len(relevant) >= config.min_passages and score < threshold:
            filtered.append(Filtered(candidate, "dropped", f"score {score:.2f} below threshold {threshold:.2f}"))
        else:
            relevant.append(candidate)
    return relevant, filtered
