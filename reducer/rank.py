"""Rank: how relevant each passage is for the question, 0 to 1.

Three signals, each scaled on its own among the candidates of this request, then a weighted mean: BM25, embedding
similarity, and the score that came with the passage. A cross-encoder, where there is one, reads the best of them again.
So no signal's unit matters: scores in [-10, 3] and in [0, 1] give the same order. A long passage counts as much as its
best window. Where the encoder is missing or fails, its weight goes to BM25 and the stage says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from reducer.config import RankConfig
from reducer.encoder import Encoder, FloatArray
from reducer.lexical import bm25_scores, covered_share, guess_language, words
from reducer.links import link_gains, named_in, read_names
from reducer.reranker import Reranker
from reducer.sentences import is_code, split_windows
from reducer.stage import Candidate, StageOutcome

SHORT_QUESTION_WORDS = 6
"""A question with fewer index words than this leans on the turn before it."""
FOREIGN_SHARE = 0.5
"""What is left of the encoder's weight for a question in a language it was not trained for."""
CODE_SHARE = 0.5
"""What is left of the weight of words where most passages are code."""
UNCOVERED = 0.2
"""Where no passage holds more of the question's words, rare ones counting most, words tell nothing: it is asked in
other words than it is answered in."""
COVERED = 0.4
"""Where one holds as much, words have their full weight."""
NO_SIMILARITY = 0.25
"""Share of the best similarity that says nothing."""


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked: the question, and the user's turn before it; lives as long as the request."""

    text: str
    context: str = ""
    _read: dict[str, list[str]] = field(default_factory=dict, compare=False, repr=False)

    def words_of(self, text: str) -> Sequence[str]:
        """``words(text)``, read once for the request: the search for noise ranks the same passages again and again."""
        found = self._read.get(text)
        if found is None:
            found = self._read[text] = words(text)
        return found


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of all texts in one list; ``owners[i]`` is the text that window ``i`` belongs to."""

    texts: tuple[str, ...]
    owners: tuple[int, ...]


def rank(
    candidates: Sequence[Candidate],
    query: Query,
    config: RankConfig,
    encoder: Encoder | None,
    reranker: Reranker | None = None,
) -> StageOutcome[Candidate]:
    """All candidates with their score, best first; ties by place in the request. Nothing is filtered here."""
    if not candidates:
        return StageOutcome(())
    texts = [searchable(candidate) for candidate in candidates]
    windows = make_windows(texts, config.window_chars)
    lexical_windows = lexical_scores(windows.texts, query, config.context_weight)
    lexical = best_window(lexical_windows, windows.owners, len(texts))
    semantic: FloatArray | None = None
    degraded: str | None = None
    if config.semantic_weight > 0:
        if encoder is None:
            degraded = "no encoder: ranked by BM25"
        else:
            try:
                semantic = _semantic(windows, lexical_windows, len(texts), query, config, encoder)
            except Exception as error:
                # Any failure of the model must cost only the model's share of the ranking.
                degraded = f"encoder failed ({type(error).__name__}): ranked by BM25"
    retriever = _retriever_scores(candidates)
    num_code = sum(is_code(candidate.passage.text) for candidate in candidates)
    coverage = covered_share([query.words_of(text) for text in windows.texts], query.words_of(query.text))
    weights = weigh(query, config, is_code=2 * num_code > len(candidates), coverage=coverage)
    scores = fuse(lexical, semantic, retriever, weights)
    if reranker is not None and config.reranker_weight > 0:
        try:
            scores = _reread(scores, windows, lexical_windows, query, config, reranker)
        except Exception as error:
            degraded = "; ".join(filter(None, (degraded, f"reranker failed ({type(error).__name__})")))
    scores, is_linked = follow_links(candidates, scores, query, config)
    scored = [
        replace(candidate, score=round(float(score), 6), is_linked=linked)
        for candidate, score, linked in zip(candidates, scores, is_linked, strict=True)
    ]
    scored.sort(key=lambda c: (-(c.score or 0.0), c.position))
    return StageOutcome(scored, degraded=degraded)


def knows_language(query: Query, config: RankConfig) -> bool:
    """Whether the encoder was trained for the question's language, as far as that can be told."""
    language = guess_language(query.text)
    return language is None or not config.encoder_languages or language in config.encoder_languages


def weigh(query: Query, config: RankConfig, *, is_code: bool = False, coverage: float = 1.0) -> RankConfig:
    """The weights for this question: an encoder that does not know its language counts half, and so do words in code.

    Identifiers are written as nobody asks for them; an exact one is still found by BM25 alone. Words count less as well
    the less of them the passages hold (``coverage``, as by ``covered_share``).
    """
    if not knows_language(query, config):
        to_words = config.semantic_weight * (1.0 - FOREIGN_SHARE)
    else:
        share = min(max((coverage - UNCOVERED) / (COVERED - UNCOVERED), 0.0), 1.0) * (CODE_SHARE if is_code else 1.0)
        to_words = -config.lexical_weight * (1.0 - share)
    if to_words == 0.0:
        return config
    return msgspec.structs.replace(
        config,
        lexical_weight=config.lexical_weight + to_words,
        semantic_weight=config.semantic_weight - to_words,
    )


def fuse(
    lexical: FloatArray, semantic: FloatArray | None, retriever: FloatArray | None, config: RankConfig
) -> FloatArray:
    """Weighted mean of the scaled signals; a missing embedding gives its weight to BM25, a missing score to both."""
    lexical_weight = config.lexical_weight + (config.semantic_weight if semantic is None else 0.0)
    total = lexical_weight * scale_lexical(lexical)
    weight = lexical_weight
    if semantic is not None:
        total = total + config.semantic_weight * scale_similarity(semantic)
        weight += config.semantic_weight
    if retriever is not None and config.retriever_weight > 0:
        total = total + config.retriever_weight * scale(retriever)
        weight += config.retriever_weight
    fused: FloatArray = (total / np.float32(max(weight, 1e-9))).astype(np.float32)
    return fused


def similarities(vectors: FloatArray, query: FloatArray) -> FloatArray:
    """Similarity of each row, shape (n,), rounded: equal rows are equal wherever they stand.

    Raises ValueError for values that are not finite.
    """
    products = vectors @ query
    if not np.isfinite(products).all():
        raise ValueError("the encoder returned values that are not finite")
    return np.round(products, 5).astype(np.float32)


def follow_links(
    candidates: Sequence[Candidate], scores: FloatArray, query: Query, config: RankConfig
) -> tuple[FloatArray, list[bool]]:
    """Scores with what names, links and siblings add, on [0, 1] again, and which passages a name links to the best.

    What answers the question best by itself stays first: a link may only bring its partner up beside it.
    """
    names = read_names(candidates)
    direct = scores + np.float32(config.named_weight) * named_in(query.text, names)
    gains = link_gains(candidates, names, direct, config)
    linked = direct + gains.scores
    linked[int(np.argmax(direct))] = linked.max()
    highest = (1.0 + config.named_weight) * (1.0 + max(config.link_weight, config.sibling_weight))
    return linked / np.float32(highest), gains.is_linked


def scale(scores: FloatArray) -> FloatArray:
    """Scores on [0, 1] between the worst and the best; all 1 when they do not differ."""
    low, high = float(scores.min()), float(scores.max())
    if high - low < 1e-9:
        return np.ones_like(scores)
    return (scores - np.float32(low)) / np.float32(high - low)


def scale_similarity(scores: FloatArray) -> FloatArray:
    """Similarities on [0, 1]: 1 is the best one, 0 a quarter of it or less.

    Not the worst one: the least of a few passages that are all relevant is no noise, and what a passage scores must
    not hang on the noise beside it.
    """
    high = float(scores.max())
    if high <= 1e-6:
        return scale(scores)
    low = NO_SIMILARITY * high
    scaled: FloatArray = np.maximum((scores - np.float32(low)) / np.float32(high - low), np.float32(0.0))
    return scaled


def scale_lexical(scores: FloatArray) -> FloatArray:
    """BM25 as a share of the best one; 0 means that no word of the question occurs, so 0 stays 0."""
    high = float(scores.max(initial=0.0))
    return scores / np.float32(high) if high > 0 else scores


def lexical_scores(texts: Sequence[str], query: Query, context_weight: float) -> FloatArray:
    """BM25 of each text for the question, plus a share of it for the turn before a short question."""
    corpus = [query.words_of(text) for text in texts]
    asked = query.words_of(query.text)
    scores = bm25_scores(corpus, asked)
    if query.context and context_weight > 0 and len(asked) < SHORT_QUESTION_WORDS:
        scores = scores + np.float32(context_weight) * bm25_scores(corpus, query.words_of(query.context))
    return scores


def query_vector(query: Query, context_weight: float, encoder: Encoder) -> FloatArray:
    """Vector of the question, leaning towards the turn before it when the question is short; length 1."""
    if query.context and context_weight > 0 and len(query.words_of(query.text)) < SHORT_QUESTION_WORDS:
        vectors = encoder.encode([query.text, query.context])
        vector: FloatArray = vectors[0] + np.float32(context_weight) * vectors[1]
        return vector / np.float32(max(float(np.linalg.norm(vector)), 1e-9))
    question: FloatArray = encoder.encode([query.text])[0]
    return question


def make_windows(texts: Sequence[str], window_chars: int) -> Windows:
    """Every text cut into windows of ``window_chars``; a text without content is one empty window."""
    pieces: list[str] = []
    owners: list[int] = []
    for owner, text in enumerate(texts):
        for window in split_windows(text, window_chars):
            pieces.append(text[window.start : window.end])
            owners.append(owner)
        if not text:
            pieces.append("")
            owners.append(owner)
    return Windows(tuple(pieces), tuple(owners))


def best_window(scores: FloatArray, owners: Sequence[int], num_texts: int) -> FloatArray:
    """The best score among the windows of each text, shape (num_texts,)."""
    best = np.full(num_texts, -np.inf, dtype=np.float32)
    np.maximum.at(best, np.asarray(owners), scores)
    return best


def _semantic(
    windows: Windows, lexical: FloatArray, num_texts: int, query: Query, config: RankConfig, encoder: Encoder
) -> FloatArray:
    """Similarity of each text's best window.

    At most ``max_windows`` of a text and ``max_embedded`` of all are embedded, the lexically best first; a text without
    any counts as the least similar.
    """
    by_owner: dict[int, list[int]] = {}
    for window, owner in enumerate(windows.owners):
        by_owner.setdefault(owner, []).append(window)
    chosen: list[int] = []
    for members in by_owner.values():
        members.sort(key=lambda window: (-float(lexical[window]), window))
        chosen.extend(members[: config.max_windows])
    if len(chosen) > config.max_embedded:
        chosen = sorted(sorted(chosen, key=lambda window: (-float(lexical[window]), window))[: config.max_embedded])
    vectors = encoder.encode([windows.texts[window] for window in chosen])
    similar = similarities(vectors, query_vector(query, config.context_weight, encoder))
    best = best_window(similar, [windows.owners[window] for window in chosen], num_texts)
    return np.where(np.isfinite(best), best, similar.min())


def _reread(
    scores: FloatArray, windows: Windows, lexical: FloatArray, query: Query, config: RankConfig, reranker: Reranker
) -> FloatArray:
    """Scores with the cross-encoder's share for the best texts, each judged by its lexically best window.

    The others are left with what the cheaper signals give them beside the share that they do not get. Raises ValueError
    for values that are not finite.
    """
    best_windows: dict[int, int] = {}
    for window, owner in enumerate(windows.owners):
        if owner not in best_windows or lexical[window] > lexical[best_windows[owner]]:
            best_windows[owner] = window
    chosen = np.argsort(-scores, kind="stable")[: config.max_reranked]
    read = reranker.score(query.text, [windows.texts[best_windows[int(owner)]] for owner in chosen])
    if not np.isfinite(read).all():
        raise ValueError("the cross-encoder returned values that are not finite")
    mixed: FloatArray = scores * np.float32(1.0 - config.reranker_weight)
    mixed[chosen] += np.float32(config.reranker_weight) * scale_lexical(np.round(read, 5))
    return mixed


def _retriever_scores(candidates: Sequence[Candidate]) -> FloatArray | None:
    """The retriever's scores; one that is missing counts as the lowest, none at all as no signal."""
    given = [c.passage.score for c in candidates if c.passage.score is not None]
    if not given:
        return None
    # Scaled before it is narrowed: a score may be larger than a float32 holds, or differ by less than one tells apart.
    largest = max(map(abs, given)) or 1.0
    low, high = min(given) / largest, max(given) / largest
    if high - low < 1e-9:
        return np.ones(len(candidates), dtype=np.float32)
    shares = [0.0 if c.passage.score is None else (c.passage.score / largest - low) / (high - low) for c in candidates]
    return np.asarray(shares, dtype=np.float32)


def searchable(candidate: Candidate) -> str:
    """The text under which a passage is looked for: its title, if it has one, and its text."""
    title = candidate.passage.title
    return f"{title}\n{candidate.passage.text}" if title else candidate.passage.text
