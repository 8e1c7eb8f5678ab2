"""Scores of a generated answer against the accepted ones: exact match, F1, and whether its citations hold."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from eval.samples import Case
from eval.scoring import SearchText, words

_ARTICLES = frozenset({"a", "an", "the"})
_CITATION = re.compile(r"\[(\d+(?:\s*[,;]\s*\d+)*)\]")


def answer_words(text: str) -> list[str]:
    """Words as SQuAD compares them: lower case, without marks and articles; letters of dense scripts one by one."""
    return [word for word in words(text).split() if word not in _ARTICLES]


def exact_match(case: Case, answer: str) -> float:
    """1 if the answer is one of the accepted ones, word for word, else 0."""
    given = answer_words(answer)
    return float(bool(given) and any(given == answer_words(accepted) for accepted in case.answers))


def f1(case: Case, answer: str) -> float:
    """Best harmonic mean of precision and recall of words over the accepted answers, 0 to 1."""
    given = Counter(answer_words(answer))
    best = 0.0
    for accepted in case.answers:
        wanted = Counter(answer_words(accepted))
        shared = sum((given & wanted).values())
        if shared:
            best = max(best, 2 * shared / (given.total() + wanted.total()))
    return best


class Citations(NamedTuple):
    """Labels that an answer cites."""

    num_cited: int
    num_valid: int
    """Those that name a passage of the prompt."""
    num_supporting: int
    """Valid ones whose passage is evidence or states an accepted answer."""

    @property
    def validity(self) -> float | None:
        """Share of the cited labels that name a passage of the prompt; ``None`` without citations."""
        return self.num_valid / self.num_cited if self.num_cited else None


def cited_labels(text: str) -> list[str]:
    """``[1]`` and ``[2, 3]`` as ``["[1]", "[2]", "[3]"]``, each once.

    >>> cited_labels("It is blue [2][1, 2].")
    ['[2]', '[1]']
    """
    numbers = (number.strip() for found in _CITATION.findall(text) for number in re.split("[,;]", found))
    return list(dict.fromkeys(f"[{number}]" for number in numbers))


def citations(case: Case, answer: str, labels: Mapping[str, list[str]]) -> Citations:
    """``labels``: label in the prompt -> ids of the passages that stand under it."""
    cited = cited_labels(answer)
    valid = [label for label in cited if labels.get(label)]
    chunks = {chunk.id: chunk for chunk in case.chunks}
    supporting = 0
    for label in valid:
        behind = [chunks[id] for id in labels[label] if id in chunks]
        supporting += any(
            chunk.gold or any(SearchText(chunk.text).states(accepted) for accepted in case.answers) for chunk in behind
        )
    return Citations(len(cited), len(valid), supporting)
