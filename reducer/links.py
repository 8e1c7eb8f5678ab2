"""Links: passages reached through what the best passages name or belong to, not only through the question.

"Where was the director of Jaws born?" finds the passage *Jaws (film)*; that names *Steven Spielberg*, whose own passage
shares no word with the question. So a passage whose subject is named in one of the best passages gains a share of that
passage's score; one that names a best passage's subject gains half of it; and so do the few neighbours of a best
passage from the same source. Passages that are only good, not best, link to those which name them in turn.

The subject of a passage is its title, or its first line, or the name that it begins with. It is a name only if it
tells passages apart: "Results" stands above passages of many sources, "England" occurs in all: neither links.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reducer.config import RankConfig
from reducer.encoder import FloatArray
from reducer.lexical import STOP_WORDS, normalise
from reducer.stage import Candidate

MIN_NAME_CHARS = 3
MIN_DENSE_NAME_CHARS = 2
MAX_NAME_CHARS = 80
MAX_TEXT_CHARS = 20_000
"""Of a longer passage only the beginning is searched for names."""
BACKWARD_SHARE = 0.5
"""What naming a best passage's subject counts, beside being named by it."""
MUTUAL_SHARE = 0.8
"""What a link counts that goes both ways, from a passage that is only good."""

_QUALIFIER = re.compile(r"\s*[(（][^()（）]*[)）]\s*$")
_LEADING_NAME = re.compile(
    r"[^\W\d_a-z][\w'’.-]*(?:\s+(?:(?:of|the|de|del|and|&|von|van|der|du)\s+)?[^\W_a-z][\w'’.-]*)*"
)
_SPEAKER = re.compile(r"[\w .'’-]{1,40}[:：][^\S\n]*\S")
_DENSE = re.compile(r"[\u0e00-\u0e7f\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]")


@dataclass(frozen=True, slots=True)
class Names:
    """Subjects that are names; both lists follow the candidates, an empty text is no name."""

    subjects: tuple[str, ...]
    texts: tuple[str, ...]
    """Normalised title and text, where names are looked up."""


def read_names(candidates: Sequence[Candidate]) -> Names:
    """The subject of each passage, unless passages of different sources share it."""
    subjects = [subject(candidate.passage.title, candidate.passage.text) for candidate in candidates]
    sources: dict[str, set[str]] = {}
    for name, candidate in zip(subjects, candidates, strict=True):
        sources.setdefault(name, set()).add(candidate.passage.source or candidate.passage.id)
    texts = [normalise(f"{c.passage.title or ''}\n{c.passage.text[:MAX_TEXT_CHARS]}") for c in candidates]
    return Names(tuple(name if len(sources[name]) == 1 else "" for name in subjects), tuple(texts))


def named_in(question: str, names: Names) -> FloatArray:
    """1 for each passage whose subject the question names, else 0; shape (n,)."""
    asked = normalise(question)
    return np.asarray([float(bool(name) and mentions(asked, name)) for name in names.subjects], dtype=np.float32)


class Gains(NamedTuple):
    """What each passage gains from the best ones, shape (n,), and whether a name links it to one of them."""

    scores: FloatArray
    is_linked: list[bool]


def link_gains(candidates: Sequence[Candidate], names: Names, scores: FloatArray, config: RankConfig) -> Gains:
    """Follow names and sources from the ``num_link_sources`` best passages to all others, and names that go both ways
    from the ``num_mutual_sources`` next best ones."""
    gains = np.zeros_like(scores)
    is_linked = [False] * len(candidates)
    num_passages = len(candidates)
    max_mentions = max(3, num_passages // 5)
    max_siblings = max(2, num_passages // 3)
    num_by_source = Counter(candidate.passage.source for candidate in candidates)
    num_mentions: dict[str, int] = {"": num_passages}

    def rarity(name: str) -> float:
        """1 for a name that tells passages apart, less for one that many mention, 0 for one that most do."""
        if name not in num_mentions:
            others = sum(mentions(text, name) for text in names.texts)
            num_mentions[name] = others - names.subjects.count(name)
        if num_mentions[name] > max(max_mentions, num_passages // 2):
            return 0.0
        return min(1.0, max_mentions / max(num_mentions[name], 1))

    num_sources = config.num_link_sources + config.num_mutual_sources
    for place, best in enumerate(np.argsort(-scores, kind="stable")[:num_sources].tolist()):
        own, source = names.subjects[best], candidates[best].passage.source
        is_best = place < config.num_link_sources
        for other in range(num_passages):
            if other == best:
                continue
            name = names.subjects[other]
            weight = 0.0
            is_named = name != own and bool(name) and mentions(names.texts[best], name)
            names_best = name != own and bool(own) and mentions(names.texts[other], own)
            forward, backward = rarity(name) if is_named else 0.0, rarity(own) if names_best else 0.0
            if is_best:
                weight = config.link_weight * max(forward, BACKWARD_SHARE * backward)
            else:
                weight = config.link_weight * MUTUAL_SHARE * min(forward, backward)
            is_linked[other] = is_linked[other] or weight > 0
            if (
                is_best
                and source
                and source == candidates[other].passage.source
                and num_by_source[source] <= max_siblings
            ):
                weight = max(weight, config.sibling_weight)
            gains[other] = max(gains[other], np.float32(weight) * scores[best])
    return Gains(gains, is_linked)


def subject(title: str | None, text: str) -> str:
    """What a passage is about, normalised; empty where nothing names it."""
    if title and title.strip():
        name = title
    else:
        head = text.lstrip()[: MAX_NAME_CHARS * 2]
        first_line, line_break, _ = head.partition("\n")
        if _SPEAKER.match(head):
            name = ""  # who speaks is not what it is about
        elif line_break and len(first_line) <= MAX_NAME_CHARS:
            name = first_line.strip(" #*-=:|\t\r")
        else:
            match = _LEADING_NAME.match(head)
            name = match.group() if match else ""
    name = " ".join(normalise(_QUALIFIER.sub("", name)).split())
    shortest = MIN_DENSE_NAME_CHARS if _DENSE.search(name) else MIN_NAME_CHARS
    is_name = shortest <= len(name) <= MAX_NAME_CHARS and not name.isdigit() and name not in STOP_WORDS
    return name if is_name else ""


def mentions(text: str, name: str) -> bool:
    """Whether a normalised text holds a normalised name, not inside a longer word."""
    start = text.find(name)
    while start >= 0:
        end = start + len(name)
        if _is_edge(text[start - 1 : start], name[0]) and _is_edge(text[end : end + 1], name[-1]):
            return True
        start = text.find(name, start + 1)
    return False


def _is_edge(neighbour: str, inner: str) -> bool:
    """Whether a name may end between these two characters; scripts without spaces have no word borders."""
    return not (neighbour.isalnum() or neighbour == "_") or bool(_DENSE.match(neighbour) or _DENSE.match(inner))
