"""Selections that a reduction must beat: head cut, BM25, embeddings, their fusion, and single sentences.

A baseline orders units (whole passages, or sentences) and takes every one that still fits, best first. It sees the same
passages and pays the same tokens as the reducer; nothing here imports it.
"""

import itertools
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import bm25s
import numpy as np
from numpy.typing import NDArray

from eval.samples import Chunk
from eval.scoring import Span

Scores = NDArray[np.float64]
Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts to rows of length 1."""

_RRF_CONSTANT = 60
"""Cormack, Clarke and Büttcher, "Reciprocal Rank Fusion", SIGIR 2009."""
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[。！？；])|\n+")
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Unit:
    """Something a baseline can take: characters of one passage."""

    chunk: int
    """Place of the passage in the case."""
    span: Span
    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Pool:
    """One case as a baseline sees it."""

    chunks: Sequence[Chunk]
    heading_tokens: Sequence[int]
    """What label and title of each passage cost, once per passage."""
    passages: Sequence[Unit]
    sentences: Sequence[Unit]


Kept = dict[int, list[Span]]
"""Place of every passage with text in the prompt -> its kept characters, in text order."""


def make_pool(chunks: Sequence[Chunk], count_text: Callable[[str], int]) -> Pool:
    """Cuts and counts the passages of a case once for all baselines."""
    passages: list[Unit] = []
    sentences: list[Unit] = []
    headings: list[int] = []
    for place, chunk in enumerate(chunks):
        heading = f"[{place + 1}] {chunk.title}\n" if chunk.title else f"[{place + 1}]\n"
        headings.append(count_text(heading) + 1)
        passages.append(Unit(place, (0, len(chunk.text)), chunk.text, count_text(chunk.text)))
        for start, end in split_sentences(chunk.text):
            text = chunk.text[start:end]
            sentences.append(Unit(place, (start, end), text, count_text(text)))
    return Pool(chunks, headings, passages, sentences)


def split_sentences(text: str) -> list[Span]:
    """Sentence ranges that cover the text; a piece of white space alone is left out."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    bounds = [0, *ends, len(text)]
    return [(a, b) for a, b in itertools.pairwise(bounds) if text[a:b].strip()]


def take(pool: Pool, units: Sequence[Unit], order: Sequence[int], max_tokens: int) -> Kept:
    """Takes units in the given order, each one that still fits with its passage's heading."""
    kept: Kept = {}
    left = max_tokens
    for index in order:
        unit = units[index]
        cost = unit.num_tokens + (0 if unit.chunk in kept else pool.heading_tokens[unit.chunk])
        if cost <= left:
            kept.setdefault(unit.chunk, []).append(unit.span)
            left -= cost
    return {chunk: sorted(spans) for chunk, spans in kept.items()}


def index_words(text: str) -> list[str]:
    """Words of a text for BM25; text without spaces as pairs of characters."""
    found: list[str] = []
    for word in _WORD.findall(unicodedata.normalize("NFKC", text).lower()):
        if any("\u3040" <= char <= "\u9fff" or "\uac00" <= char <= "\ud7af" for char in word):
            found.extend(word[i : i + 2] for i in range(max(1, len(word) - 1)))
        else:
            found.append(word)
    return found


def bm25(question: str, texts: Sequence[str]) -> Scores:
    """Okapi BM25 (k1 = 1.5, b = 0.75) of each text."""
    corpus = [index_words(text) for text in texts]
    asked = index_words(question)
    if not asked or not any(corpus):
        return np.zeros(len(texts))
    index = bm25s.BM25(k1=1.5, b=0.75)
    index.index(corpus, show_progress=False)
    return np.asarray(index.get_scores(asked), dtype=np.float64)


def by_score(scores: Scores) -> list[int]:
    """Best first, ties by place."""
    return [int(place) for place in np.argsort(-scores, kind="stable")]


def fuse(*rankings: Sequence[int]) -> list[int]:
    """Reciprocal rank fusion."""
    scores = np.zeros(len(rankings[0]))
    for ranking in rankings:
        for rank, place in enumerate(ranking):
            scores[place] += 1.0 / (_RRF_CONSTANT + rank + 1)
    return by_score(scores)


class Baselines:
    """The orders of one case, computed once and cut at every budget."""

    names = ("head", "bm25", "embedding", "bm25+embedding", "sentences")

    def __init__(self, question: str, pool: Pool, embed: Embed) -> None:
        self._pool = pool
        texts = [with_title(chunk) for chunk in pool.chunks]
        sentences = [unit.text for unit in pool.sentences]
        query = embed([question])[0]
        lexical, semantic = by_score(bm25(question, texts)), by_score(_similarity(texts, query, embed))
        self._orders: dict[str, tuple[Sequence[Unit], list[int]]] = {
            "head": (pool.passages, list(range(len(texts)))),
            "bm25": (pool.passages, lexical),
            "embedding": (pool.passages, semantic),
            "bm25+embedding": (pool.passages, fuse(lexical, semantic)),
            "sentences": (
                pool.sentences,
                fuse(by_score(bm25(question, sentences)), by_score(_similarity(sentences, query, embed))),
            ),
        }

    def keep(self, name: str, max_tokens: int) -> Kept:
        """What the named baseline keeps in at most ``max_tokens`` tokens."""
        units, order = self._orders[name]
        return take(self._pool, units, order, max_tokens)


def _similarity(texts: Sequence[str], query: NDArray[np.float32], embed: Embed) -> Scores:
    return np.asarray(embed(texts) @ query, dtype=np.float64) if texts else np.zeros(0)


def with_title(chunk: Chunk) -> str:
    """A chunk as it is ranked: its title, if any, on a line of its own."""
    return f"{chunk.title}\n{chunk.text}" if chunk.title else chunk.text
