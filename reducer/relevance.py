"""Relevance: how much older turns, and the sentences in them, have to do with the question, 0 to 1.

    user       Have you seen that band live?             .9  asks for what is asked now
    assistant  Only once, at a small club in Leeds.      .4  -> .9  the answer is as relevant as what it answers

BM25 and embedding similarity are scaled among the turns of this request, so there is always a best one. Whether the
question finds anything at all is told by the similarity as it is: "thanks, and now?" has nothing to do with any turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reducer.config import RankConfig
from reducer.encoder import Encoder, FloatArray
from reducer.pieces import asks
from reducer.rank import Query, knows_language, lexical_scores, query_vector, scale, scale_lexical, similarities, weigh
from reducer.turns import both_ends

MAX_EMBEDDED_CHARS = 4_000
"""Of a longer turn only both ends are embedded; BM25 reads all of it."""
MIN_SIMILARITY = 0.35
"""A question that is less like every turn asks for none of them, where the encoder knows its language."""
SENTENCE_SHARE = 0.3
"""How much a sentence's own relevance counts beside its turn's."""


@dataclass(frozen=True, slots=True)
class Relevance:
    """Relevance of older turns for one question."""

    scores: FloatArray
    """Of each turn, 0 to 1."""
    is_found: bool
    """Whether the question finds any turn."""
    query: Query
    config: RankConfig
    encoder: Encoder | None
    """Missing where it failed or has no weight."""
    lowest: float = 0.0
    highest: float = 0.0
    """Similarities that are 0 and 1 among the turns."""
    degraded: str | None = None

    def of_sentences(self, sentences: Sequence[str], owners: Sequence[int]) -> FloatArray:
        """Relevance of sentences of the turns ``owners``, shape (n,)."""
        if not sentences:
            return np.zeros(0, dtype=np.float32)
        own = scale_lexical(lexical_scores(sentences, self.query, self.config.context_weight))
        if self.encoder is not None:
            try:
                similar = _similar(sentences, self.query, self.config, self.encoder)
            except Exception:
                # Without the encoder the turns' scores and the words are left, which is enough to go on with.
                similar = None
            if similar is not None:
                span = np.float32(max(self.highest - self.lowest, 1e-6))
                own = _mix(own, np.clip((similar - np.float32(self.lowest)) / span, 0.0, 1.0), self.config)
        turns = self.scores[np.asarray(owners)]
        mixed: FloatArray = turns * np.float32(1.0 - SENTENCE_SHARE) + own * np.float32(SENTENCE_SHARE)
        return mixed


def rate_turns(texts: Sequence[str], query: Query, config: RankConfig, encoder: Encoder | None) -> Relevance:
    """Relevance of turns that follow each other. An encoder that is missing or fails leaves BM25, and says so."""
    config = weigh(query, config)
    if not texts:
        return Relevance(np.zeros(0, dtype=np.float32), False, query, config, None)
    lexical = scale_lexical(lexical_scores(texts, query, config.context_weight))
    degraded = None
    if config.semantic_weight > 0:
        if encoder is None:
            degraded = "no encoder: turns ranked by BM25"
        else:
            try:
                similar = _similar(texts, query, config, encoder)
            except Exception as error:
                degraded = f"encoder failed ({type(error).__name__}): turns ranked by BM25"
            else:
                lowest, highest = float(similar.min()), float(similar.max())
                is_found = highest >= MIN_SIMILARITY or not knows_language(query, config)
                scores = _lift_replies(_mix(lexical, scale(similar), config), texts)
                return Relevance(scores, is_found, query, config, encoder, lowest, highest)
    return Relevance(_lift_replies(lexical, texts), bool(lexical.any()), query, config, None, degraded=degraded)


def _similar(texts: Sequence[str], query: Query, config: RankConfig, encoder: Encoder) -> FloatArray:
    vectors = encoder.encode([both_ends(text, MAX_EMBEDDED_CHARS) for text in texts])
    return similarities(vectors, query_vector(query, config.context_weight, encoder))


def _mix(lexical: FloatArray, semantic: FloatArray, config: RankConfig) -> FloatArray:
    weight = np.float32(config.lexical_weight + config.semantic_weight)
    mixed: FloatArray = np.float32(config.lexical_weight) * lexical + np.float32(config.semantic_weight) * semantic
    return mixed / weight


def _lift_replies(scores: FloatArray, texts: Sequence[str]) -> FloatArray:
    """Scores where a turn behind one that ends with a question is at least as relevant as that one."""
    lifted = scores.copy()
    for place in range(1, len(texts)):
        if asks(texts[place - 1]):
            lifted[place] = max(lifted[place], scores[place - 1])
    return lifted
