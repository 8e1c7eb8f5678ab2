"""Receipt: one decision for every passage the caller may read, so that tokens add up and everything can be undone."""

from collections.abc import Mapping, Sequence

from reducer.result import PassageDecision, TurnDecision
from reducer.stage import Candidate, Filtered, Selected
from reducer.stitching import covered_chars, own_sizes, window_spans


def decide_documents(
    candidates: Sequence[Candidate], selected: Sequence[Selected], filtered: Sequence[Filtered]
) -> list[PassageDecision]:
    """Decisions in request order. ``candidates`` are all readable passages as they entered the first stage.

    Of a stitched passage every window has its own decision: one bears the label, the others are merged into it with the
    spans of their text that are in the prompt under it.
    """
    decisions: dict[str, PassageDecision] = {}
    received = {candidate.passage.id: candidate.num_tokens for candidate in candidates}
    stitched = {
        window.candidate.passage.id: kept.candidate.passage.id for kept in selected for window in kept.candidate.windows
    }

    def note(decision: PassageDecision) -> None:
        assert decision.id not in decisions, f"passage {decision.id!r} was decided twice"
        decisions[decision.id] = decision

    for kept in selected:
        for decision in _decide_windows(kept, received) if kept.candidate.windows else [_decide_kept(kept, received)]:
            note(decision)
    for gone in filtered:
        candidate = gone.candidate
        note(
            PassageDecision(
                id=candidate.passage.id,
                action=gone.action,
                reason=gone.reason,
                score=candidate.score,
                tokens_before=received[candidate.passage.id],
                tokens_after=0,
                merged_into=None if gone.merged_into is None else stitched.get(gone.merged_into, gone.merged_into),
                sources=list(candidate.sources),
            )
        )
    return [decisions[candidate.passage.id] for candidate in candidates]


def _decide_kept(kept: Selected, received: Mapping[str, int]) -> PassageDecision:
    candidate = kept.candidate
    return PassageDecision(
        id=candidate.passage.id,
        action="kept" if kept.is_whole else "trimmed",
        reason=kept.reason,
        score=candidate.score,
        label=candidate.label,
        tokens_before=received[candidate.passage.id],
        tokens_after=kept.num_tokens,
        spans=[(span.start, span.end) for span in kept.received_spans],
        sources=list(candidate.sources),
    )


def _decide_windows(kept: Selected, received: Mapping[str, int]) -> list[PassageDecision]:
    """The tokens of the stitched text are split by characters; those that two windows share are the first one's."""
    head = kept.candidate
    windows = window_spans(kept)
    sizes = own_sizes(kept)
    num_left, size_left = kept.num_tokens, sum(sizes)
    decisions: list[PassageDecision] = []
    for (own, spans), size in zip(windows, sizes, strict=True):
        num_tokens = num_left * size // size_left if size_left else 0
        num_left, size_left = num_left - num_tokens, size_left - size
        is_head = own.passage.id == head.passage.id
        is_cut = own.cleaned is not None or covered_chars(spans) < len(own.passage.text.strip())
        decisions.append(
            PassageDecision(
                id=own.passage.id,
                action=("trimmed" if is_cut else "kept") if is_head else "merged",
                reason=kept.reason if is_head else "overlapping window",
                score=head.score,
                label=head.label if is_head else None,
                tokens_before=received[own.passage.id],
                tokens_after=num_tokens,
                spans=[(span.start, span.end) for span in spans],
                merged_into=None if is_head else head.passage.id,
                sources=list(head.sources if is_head else own.sources),
            )
        )
    return decisions


def keep_turns(turn_tokens: Mapping[int, int], reason: str) -> list[TurnDecision]:
    """Decisions that keep every history message; ``turn_tokens`` maps its index to its tokens."""
    return [
        TurnDecision(index=index, action="kept", reason=reason, tokens_before=tokens, tokens_after=tokens)
        for index, tokens in turn_tokens.items()
    ]
