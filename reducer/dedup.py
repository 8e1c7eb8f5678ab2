"""Dedup: a passage that says what another one already says is merged into it."""

import re
from collections.abc import Sequence
from dataclasses import replace

from reducer.config import DedupConfig
from reducer.lexical import normalise
from reducer.stage import Candidate, Filtered, StageOutcome


def deduplicate(candidates: Sequence[Candidate], config: DedupConfig) -> StageOutcome[Candidate]:
    """Merge passages whose text differs in case and white space only; order does not choose the survivor."""
    if not config.enabled:
        return StageOutcome(tuple(candidates))
    survivors: dict[str, Candidate] = {}
    filtered: list[Filtered] = []
    for candidate in sorted(candidates, key=lambda c: (-(c.passage.score or 0.0), -len(c.passage.text), c.passage.id)):
        key = re.sub(r"\s+", " ", normalise(candidate.passage.text)).strip()
        survivor = survivors.get(key)
        if survivor is None or not key:
            survivors[key or candidate.passage.id] = candidate
            continue
        survivors[key] = replace(survivor, sources=(*survivor.sources, candidate.passage.id))
        filtered.append(Filtered(candidate, "merged", "same text", survivor.passage.id))
    return StageOutcome(sorted(survivors.values(), key=lambda c: c.position), filtered)
