"""Extraction: a passage that does not fit whole is cut to its units that say most about the question, verbatim.

A unit is a sentence, a table row or a code line. A table's header comes with any of its rows. One extractor serves
one request: it scores the units of a passage once, however often the budget changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reducer.clean import is_furniture
from reducer.config import RankConfig
from reducer.encoder import Encoder, FloatArray
from reducer.lexical import bm25_scores, words
from reducer.rank import Query, knows_language, query_vector, scale_lexical, similarities
from reducer.sentences import split_units
from reducer.stage import Candidate, Span
from reducer.table_rows import header_rows
from reducer.template import GAP
from reducer.tokens import TokenCounter

MAX_EMBEDDED_UNITS = 48
"""Units of one passage that are embedded, the lexically best ones; the rest are judged by BM25 alone."""

LEXICAL_SHARE = 0.15
"""Weight of BM25, scaled to 1, beside the similarity of a unit to the question."""
FOREIGN_LEXICAL_SHARE = 0.4
"""The same for a question in a language the encoder was not trained for."""
NEIGHBOUR_SHARE = 0.3
"""Share of the better neighbour's score: an answer often stands beside the sentence that resembles the question."""
FIRST_UNIT_BONUS = 0.1


@dataclass(frozen=True, slots=True)
class PassageExtract:
    """The kept spans of one passage and the tokens they take."""

    spans: tuple[Span, ...]
    num_tokens: int


@dataclass(slots=True)
class _Units:
    spans: list[Span]
    order: list[int]
    """Units from the most to the least relevant."""
    num_tokens: dict[int, int]
    """Counted when first needed."""
    headers: dict[int, tuple[int, ...]]
    """For each table row the units of its header."""


class Extractor:
    """Cuts passages of one request to a number of tokens."""

    def __init__(self, query: Query, config: RankConfig, counter: TokenCounter, encoder: Encoder | None) -> None:
        self._query = query
        self._asked = frozenset(query.words_of(query.text))
        self._config = config
        self._counter = counter
        self._encoder = encoder
        self._units: dict[str, _Units] = {}
        self._num_gap_tokens = counter.count_text(GAP)
        self.degraded: str | None = None
        """Why units were ranked by BM25 alone, if they were."""

    def extract(self, candidate: Candidate, max_tokens: int) -> PassageExtract | None:
        """The best units of a passage in at most ``max_tokens`` tokens, in text order; ``None`` if not one fits."""
        text = candidate.passage.text
        units = self._units.get(candidate.passage.id)
        if units is None:
            units = self._units[candidate.passage.id] = self._score_units(text)
        chosen: set[int] = set()
        used = 0
        for unit in units.order:
            if max_tokens - used < 2:
                break
            if unit in chosen:
                continue
            added = [need for need in (*units.headers.get(unit, ()), unit) if need not in chosen]
            num_tokens = 0
            for need in added:
                joins = (need - 1 in chosen) + (need + 1 in chosen)
                # A new island costs a gap; filling the space between two islands takes one away.
                num_tokens += self._count(text, units, need) + (self._num_gap_tokens * (1 - joins) if chosen else 0)
                chosen.add(need)
            if used + num_tokens <= max_tokens:
                used += num_tokens
            else:
                chosen.difference_update(added)
        said = chosen - {unit for header in units.headers.values() for unit in header}
        lines = (text[span.start : span.end].strip() for span in map(units.spans.__getitem__, said))
        if all(is_furniture(line, False, self._asked) for line in lines):
            return None  # headers of no row, or furniture around code or a table, where nothing was cleaned
        return PassageExtract(_merge([units.spans[unit] for unit in sorted(chosen)]), max(used, 1))

    def _count(self, text: str, units: _Units, unit: int) -> int:
        num_tokens = units.num_tokens.get(unit)
        if num_tokens is None:
            span = units.spans[unit]
            num_tokens = units.num_tokens[unit] = self._counter.count_text(text[span.start : span.end])
        return num_tokens

    def _score_units(self, text: str) -> _Units:
        spans = split_units(text)
        texts = [text[span.start : span.end] for span in spans]
        scores = self._scores(texts)
        order = sorted(range(len(spans)), key=lambda unit: (-float(scores[unit]), unit))
        return _Units(spans, order, {}, header_rows(text, texts))

    def _scores(self, texts: Sequence[str]) -> FloatArray:
        lexical = scale_lexical(bm25_scores([words(text) for text in texts], self._query.words_of(self._query.text)))
        return _in_context(self._relevance(texts, lexical))

    def _relevance(self, texts: Sequence[str], lexical: FloatArray) -> FloatArray:
        """Similarity to the question, with BM25 beside it; BM25 alone without an encoder."""
        if self._encoder is None or self._config.semantic_weight <= 0 or len(texts) < 2:
            return lexical
        embedded = np.argsort(-lexical, kind="stable")[:MAX_EMBEDDED_UNITS]
        try:
            vectors = self._encoder.encode([texts[unit] for unit in embedded])
            similar = similarities(vectors, query_vector(self._query, self._config.context_weight, self._encoder))
        except Exception as error:
            # Any failure of the model must cost only the model's share of the choice.
            self.degraded = f"encoder failed ({type(error).__name__}): sentences chosen by BM25"
            return lexical
        semantic = np.full(len(texts), similar.min(), dtype=np.float32)
        semantic[embedded] = similar
        share = LEXICAL_SHARE if knows_language(self._query, self._config) else FOREIGN_LEXICAL_SHARE
        return semantic + np.float32(share) * lexical


def _in_context(scores: FloatArray) -> FloatArray:
    """Scores with a share of the best neighbour, and a little for the first unit, which says what the rest is about."""
    raised = scores.copy()
    if len(scores) > 1:
        before = np.concatenate(([0.0], scores[:-1]))
        after = np.concatenate((scores[1:], [0.0]))
        raised += np.float32(NEIGHBOUR_SHARE) * np.maximum(before, after).astype(np.float32)
        raised[0] += np.float32(FIRST_UNIT_BONUS)
    return raised


def _merge(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbouring spans become one."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].end == span.start:
            merged[-1] = Span(merged[-1].start, span.end)
        else:
            merged.append(span)
    return tuple(merged)
