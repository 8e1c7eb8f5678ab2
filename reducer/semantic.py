"""Semantic dedup: pairs of passages whose embeddings are close, verified like all others.

Similar embeddings prove nothing: "enable" and "disable" are neighbours, and so are two prices. So an index over the
embeddings only proposes pairs that shingles of characters may have missed, such as numbers written in another way; the
fact guard decides. The embeddings are the ones that ranking needs anyway, of the same texts in the same windows, so
they come from the encoder's cache there and cost nothing twice. Without an encoder nothing is proposed, and the stage
says so.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from reducer.config import DedupConfig, RankConfig
from reducer.dedup import Pairs, merge_pairs, preference
from reducer.encoder import Encoder, FloatArray
from reducer.rank import make_windows, searchable
from reducer.stage import Candidate, Filtered, StageOutcome


def merge_similar(
    candidates: Sequence[Candidate],
    config: DedupConfig,
    rank_config: RankConfig,
    encoder: Encoder | None,
    asked: AbstractSet[str] = frozenset(),
    earlier: Sequence[Filtered] = (),
) -> StageOutcome[Candidate]:
    """Merge passages into others with similar embeddings that state the same or more. Survivors keep request order.

    ``earlier`` are the passages that were merged into some of these before.
    """
    if not (config.enabled and config.semantic and rank_config.semantic_weight > 0) or len(candidates) < 2:
        return StageOutcome(tuple(candidates))
    if encoder is None:
        return StageOutcome(tuple(candidates), degraded="no encoder: copies found by their characters only")
    ordered = sorted(candidates, key=preference)
    try:
        places, vectors = embed_passages(ordered, rank_config, encoder)
        pairs = propose_similar(vectors, config)
    except Exception as error:
        # Any failure of the model must cost only the pairs it would have proposed.
        why = f"encoder failed ({type(error).__name__}): copies found by their characters only"
        return StageOutcome(tuple(candidates), degraded=why)
    placed = [(places[first], places[second]) for first, second in pairs]
    outcome = merge_pairs(ordered, placed, earlier, config, asked)
    num_left_out = len(ordered) - len(places)
    left_out = f"{num_left_out} long passages compared by their characters only" if num_left_out else None
    return StageOutcome(outcome.kept, outcome.filtered, "; ".join(filter(None, (outcome.degraded, left_out))) or None)


def embed_passages(ordered: Sequence[Candidate], config: RankConfig, encoder: Encoder) -> tuple[list[int], FloatArray]:
    """Places of the passages that ranking embeds in full, and their vectors: float32 (n, dim), rows of length 1.

    The vector of a passage is the mean of its windows. One with more windows than ``max_windows``, or beyond
    ``max_embedded`` windows in all, is left out: ranking embeds only some windows of it.
    """
    windows = make_windows([searchable(candidate) for candidate in ordered], config.window_chars)
    by_owner: dict[int, list[str]] = {}
    for text, owner in zip(windows.texts, windows.owners, strict=True):
        by_owner.setdefault(owner, []).append(text)
    if sum(min(len(texts), config.max_windows) for texts in by_owner.values()) > config.max_embedded:
        return [], np.zeros((0, 1), dtype=np.float32)
    places = [owner for owner, texts in by_owner.items() if len(texts) <= config.max_windows]
    rows = encoder.encode([text for owner in places for text in by_owner[owner]])
    vectors = np.zeros((len(places), rows.shape[1]), dtype=np.float32)
    np.add.at(vectors, [row for row, owner in enumerate(places) for _ in by_owner[owner]], rows)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-9))
    if not np.isfinite(vectors).all():
        raise ValueError("the encoder returned values that are not finite")
    return places, vectors


def propose_similar(vectors: FloatArray, config: DedupConfig) -> Pairs:
    """Pairs ``(i, j)``, ``i < j``, of rows at least ``min_similarity`` alike, the most similar first."""
    if len(vectors) < 2:
        return []
    import faiss

    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    similarities, neighbours = index.search(vectors, min(config.max_neighbours + 1, len(vectors)))
    similar: dict[tuple[int, int], float] = {}
    for row, (values, others) in enumerate(zip(similarities.tolist(), neighbours.tolist(), strict=True)):
        for value, other in zip(values, others, strict=True):
            # Rounded, so that the last bits of a batch do not decide.
            if other != row and other >= 0 and round(value, 5) >= config.min_similarity:
                similar[min(row, other), max(row, other)] = round(value, 5)
    return sorted(similar, key=lambda pair: (-similar[pair], pair))[: config.max_alignments]
