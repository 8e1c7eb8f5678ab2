"""Receipt: one decision for every passage the caller may read, so that tokens add up and everything can be undone."""

from collections.abc import Mapping, Sequence

from reducer.result import PassageDecision, TurnDecision
from reducer.stage import Candidate, Filtered, Selected


def decide_documents(
    candidates: Sequence[Candidate], selected: Sequence[Selected], filtered: Sequence[Filtered]
) -> list[PassageDecision]:
    """Decisions in request order. ``candidates`` are all readable passages as they entered the first stage."""
    decisions: dict[str, PassageDecision] = {}
    received = {candidate.passage.id: candidate.num_tokens for candidate in candidates}
    for kept in selected:
        candidate = kept.candidate
        decisions[candidate.passage.id] = PassageDecision(
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
    for gone in filtered:
        candidate = gone.candidate
        assert candidate.passage.id not in decisions, f"passage {candidate.passage.id!r} was decided twice"
        decisions[candidate.passage.id] = PassageDecision(
            id=candidate.passage.id,
            action=gone.action,
            reason=gone.reason,
            score=candidate.score,
            tokens_before=received[candidate.passage.id],
            tokens_after=0,
            merged_into=gone.merged_into,
            sources=list(candidate.sources),
        )
    return [decisions[candidate.passage.id] for candidate in candidates]


def keep_turns(turn_tokens: Mapping[int, int], reason: str) -> list[TurnDecision]:
    """Decisions that keep every history message; ``turn_tokens`` maps its index to its tokens."""
    return [
        TurnDecision(index=index, action="kept", reason=reason, tokens_before=tokens, tokens_after=tokens)
        for index, tokens in turn_tokens.items()
    ]
