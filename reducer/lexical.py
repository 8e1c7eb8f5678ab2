"""Words of any script, and BM25 over them.

Scripts without spaces are indexed by overlapping pairs of characters; identifiers such as ``QX-417-KD`` stay one
word and are also indexed by their parts, so an exact match outweighs a partial one.
"""

import logging
import math
import re
import unicodedata
from collections.abc import Sequence

import bm25s
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to debug when it is imported

_RUN = re.compile(
    r"(?P<dense>[\u0e00-\u0e7f\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+)"
    r"|(?P<hangul>[\u1100-\u11ff\uac00-\ud7af]+)"
    r"|(?P<number>\d+(?:[.,]\d+)+(?![^\W_]))"
    r"|(?P<word>[^\W_]+(?:[-_./:@#&'’+][^\W_]+)*)"
)
_PART = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_DENSE_CHAR = re.compile(r"[\u0e00-\u0e7f\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")

_FUNCTION_WORDS = {
    "en": """a an the of in on at by for with to and or is are was were be been being it its this that these those as
        from what which who whom whose when where why how do does did has have had i you he she we they me my your his
        her our their there here can could will would should may might must not no so if than then into about""",
    "de": """der die das den dem des ein eine einer eines und oder ist sind war waren von im in am zu zur zum mit für
        auf aus bei was wer wie wo wann warum welche welcher welches wurde wurden hat haben""",
    "es": """el la los las un una unos unas de del y o es son era fue en con por para que qué quién cuál cuándo dónde
        cómo se su""",
    "fr": """le la les des du de un une au aux et ou est sont dans sur par pour qui que quel quelle quand où comment""",
    "ru": """и в на с по к о от из за для не что кто как где когда какой какая какие был была были это""",
}
FUNCTION_WORDS = {language: frozenset(text.split()) for language, text in _FUNCTION_WORDS.items()}
STOP_WORDS = frozenset().union(*FUNCTION_WORDS.values())
"""Words that say nothing about a topic. ``not`` is among them for ranking only; the fact guard has its own list."""

_SCRIPTS = (
    ("ja", re.compile(r"[\u3040-\u30ff]")),
    ("zh", re.compile(r"[\u2e80-\u2fdf\u3400-\u9fff\uf900-\ufaff]")),
    ("ko", re.compile(r"[\u1100-\u11ff\uac00-\ud7af]")),
    ("th", re.compile(r"[\u0e00-\u0e7f]")),
    ("ru", re.compile(r"[\u0400-\u052f]")),
    ("el", re.compile(r"[\u0370-\u03ff]")),
    ("he", re.compile(r"[\u0590-\u05ff]")),
    ("ar", re.compile(r"[\u0600-\u06ff]")),
    ("hi", re.compile(r"[\u0900-\u097f]")),
)


def guess_language(text: str) -> str | None:
    """Language code of a short text by its script, then by its function words; ``None`` where neither tells.

    Coarse on purpose: one code stands for a script that several languages share.
    """
    num_letters = sum(map(str.isalpha, text))
    for language, script in _SCRIPTS:
        if 3 * len(script.findall(text)) > num_letters > 0:
            return language
    found = re.findall(r"[^\W\d_]+", text.casefold())
    votes = {language: sum(word in known for word in found) for language, known in FUNCTION_WORDS.items()}
    language = max(votes, key=lambda candidate: votes[candidate])  # English wins ties: it comes first
    return language if votes[language] else None


def normalise(text: str) -> str:
    """NFKC and case folded: full-width letters and digits equal the plain ones."""
    return unicodedata.normalize("NFKC", text).casefold() if not text.isascii() else text.lower()


def words(text: str) -> list[str]:
    """Index words of a text in order; stop words are left out."""
    tokens: list[str] = []
    camel_text = text if text.isascii() else unicodedata.normalize("NFKC", text)
    for match in _RUN.finditer(camel_text):
        run = match.group()
        kind = match.lastgroup
        if kind == "word":
            _add_word(run, tokens)
        elif kind == "number":
            tokens.append(run.replace(",", ""))
        elif len(run) == 1:
            tokens.append(run)
        else:
            tokens.extend(run[i : i + 2] for i in range(len(run) - 1))
            if kind == "hangul" and len(run) > 2:
                tokens.append(run)
    return tokens


def _add_word(run: str, tokens: list[str]) -> None:
    word = run.casefold()
    if _DENSE_CHAR.search(word):  # letters and CJK without a space between them
        for piece in re.split(f"({_DENSE_CHAR.pattern}+)", word):
            if _DENSE_CHAR.match(piece):
                tokens.extend(piece[i : i + 2] for i in range(max(len(piece) - 1, 1)))
            elif piece:
                tokens.append(piece)
        return
    parts = _PART.findall(word)
    if len(parts) > 1:
        if any(mark in word for mark in "'’") and parts[-1] in {"s", "t", "re", "ve", "ll", "d", "m"}:
            parts = parts[:-1]
        else:
            tokens.append(word)
    elif any(c.isupper() for c in run[1:]) and any(c.islower() for c in run):
        camel = [piece.casefold() for piece in _CAMEL.findall(run)]
        if len(camel) > 1:
            tokens.append(word)
            parts = camel
    tokens.extend(stem(part) for part in parts if part not in STOP_WORDS)


def stem(word: str) -> str:
    """An English plural or verb ending taken off, nothing bolder: ``cities`` and ``city`` meet, names stay apart."""
    if len(word) < 4 or not word.isascii() or not word.isalpha():
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("sses", "shes", "ches", "xes")):
        return word[:-2]
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    if word.endswith("ing") and len(word) > 6:
        return word[:-3]
    if word.endswith("ed") and len(word) > 5:
        return word[:-2]
    return word


def covered_share(corpus: Sequence[Sequence[str]], query: Sequence[str]) -> float:
    """How much of a query the text with most of it holds, 0 to 1, its words weighed by how rare they are.

    A word that no text holds weighs most: the texts say it in other words, or not at all. 1 for a query without words.
    """
    texts = [set(tokens) for tokens in corpus]
    weights: dict[str, float] = {}
    for word in query:
        num_texts = sum(word in text for text in texts)
        weights[word] = math.log(1.0 + (len(texts) - num_texts + 0.5) / (num_texts + 0.5))
    total = sum(weights.values())
    if total <= 0.0:
        return 1.0
    held = (sum(weight for word, weight in weights.items() if word in text) for text in texts)
    return max(held, default=0.0) / total


def bm25_scores(corpus: Sequence[Sequence[str]], query: Sequence[str]) -> FloatArray:
    """BM25 of each tokenised text for the query, shape (n,); all zero when nothing of the query occurs."""
    scores = np.zeros(len(corpus), dtype=np.float32)
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(token, len(vocabulary)) for token in tokens] for tokens in corpus]
    # Repeated query words count once: a question that says a word twice asks for it no more.
    known = [vocabulary[token] for token in dict.fromkeys(query) if token in vocabulary]
    if not known:
        return scores
    index = bm25s.BM25(method="lucene", k1=1.2, b=0.6)
    index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
    scores[:] = index.get_scores(known)
    return scores
