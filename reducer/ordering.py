"""Ordering: in which order the passages are written, and how a tenant's prompts come to share their beginning.

``cache`` looks for the recently served prompt that shares the longest beginning with this one, and writes the shared
passages first, in that prompt's order, then the others with the best last. So the engine finds the beginning in its
prefix cache. Labels then follow the place in the prompt, since a label that follows the request would differ.

    served before   A B C           this request  C A D B (by score, worst first)
    written         A B C D         shared prefix A B C

How far this may go against the order by score is limited: the loss of rank is the share of the score differences
between pairs of passages that stand the wrong way round, 0 for best last, 1 for best first.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from reducer.config import DocumentOrder
from reducer.stage import Selected

PassageKey = bytes
"""Digest of what a passage contributes to the prompt; no text."""
PrefixKey = bytes
"""Digest of whose prompt it is and of all that stands before the passages."""


class OrderMemory:
    """Document sequences of recently served prompts, by digest; bounded and safe for many threads.

    A sequence is found only under the scope and the beginning of the prompt it was served with, so tenants never see
    each other's.
    """

    def __init__(self, max_prefixes: int = 1024, max_sequences: int = 16) -> None:
        self._max_prefixes = max_prefixes
        self._max_sequences = max_sequences
        self._sequences: OrderedDict[PrefixKey, list[tuple[PassageKey, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def recent(self, prefix: PrefixKey) -> tuple[tuple[PassageKey, ...], ...]:
        """Sequences served after this beginning, latest first."""
        with self._lock:
            found = self._sequences.get(prefix)
            return tuple(reversed(found)) if found else ()

    def remember(self, prefix: PrefixKey, sequence: Sequence[PassageKey]) -> None:
        """Note a served sequence; the least recently used go when there are too many."""
        if not sequence:
            return
        served = tuple(sequence)
        with self._lock:
            found = self._sequences.setdefault(prefix, [])
            self._sequences.move_to_end(prefix)
            if served in found:
                found.remove(served)
            found.append(served)
            del found[: -self._max_sequences]
            while len(self._sequences) > self._max_prefixes:
                self._sequences.popitem(last=False)


def prefix_key(scope: str, *parts: str) -> PrefixKey:
    """Digest of a scope and of the text before the passages; the lengths keep ``ab, c`` and ``a, bc`` apart."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (scope, *parts):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def passage_key(item: Selected) -> PassageKey:
    """Digest of title and kept text."""
    passage = item.candidate.passage
    text = "\x00".join(passage.text[span.start : span.end] for span in item.spans)
    return prefix_key(passage.title or "", text)


def order_documents(selected: Sequence[Selected], order: DocumentOrder) -> list[Selected]:
    """The passages in the order in which they are written; ties by place in the request.

    ``cache`` without anything served before is best last, with ties by content, so that it does not depend on the
    order of the request.
    """
    if order == "input":
        return sorted(selected, key=lambda item: item.candidate.position)
    if order == "cache":
        return relabel(sorted(selected, key=lambda item: (item.candidate.score or 0.0, passage_key(item))))
    best_first = sorted(selected, key=lambda item: (-(item.candidate.score or 0.0), item.candidate.position))
    return best_first if order == "best_first" else best_first[::-1]


def order_for_reuse(
    selected: Sequence[Selected], served: Sequence[Sequence[PassageKey]], max_rank_loss: float
) -> list[Selected]:
    """The order that shares the most tokens with a served sequence and loses at most ``max_rank_loss`` of rank.

    ``served`` are sequences of the same scope and beginning, latest first; the latest wins a tie.
    """
    keyed = sorted(((item.candidate.score or 0.0, passage_key(item), item) for item in selected), key=lambda e: e[:2])
    base = [item for _, _, item in keyed]
    places = {key: place for place, (_, key, _) in reversed(list(enumerate(keyed)))}
    best, best_tokens = base, 0
    for sequence in served:
        shared = _shared_prefix(sequence, places)
        for length in range(len(shared), 0, -1):
            first = [base[place] for place in shared[:length]]
            num_tokens = sum(item.num_tokens + item.candidate.num_label_tokens for item in first)
            if num_tokens <= best_tokens:
                break
            taken = set(shared[:length])
            arranged = first + [item for place, item in enumerate(base) if place not in taken]
            if rank_loss(arranged) <= max_rank_loss:
                best, best_tokens = arranged, num_tokens
                break
    return relabel(best)


def rank_loss(arranged: Sequence[Selected]) -> float:
    """Share of the score differences between pairs that stand better first, 0 to 1; 0 where all scores are equal."""
    scores = np.asarray([item.candidate.score or 0.0 for item in arranged], dtype=np.float64)
    differences = scores[:, None] - scores[None, :]
    total = float(np.abs(differences).sum()) / 2
    if total <= 0.0:
        return 0.0
    return float(np.triu(np.maximum(differences, 0.0)).sum()) / total


def relabel(arranged: Sequence[Selected]) -> list[Selected]:
    """The passages labelled by their place in the prompt."""
    return [replace(item, candidate=replace(item.candidate, place=place)) for place, item in enumerate(arranged)]


def make_arrange(
    order: DocumentOrder, served: Sequence[Sequence[PassageKey]], max_rank_loss: float
) -> Callable[[Sequence[Selected]], list[Selected]]:
    """The ordering of one request; ``served`` as in ``order_for_reuse``, used by ``cache`` only."""
    if order != "cache":
        return lambda selected: order_documents(selected, order)
    return lambda selected: order_for_reuse(selected, served, max_rank_loss)


def _shared_prefix(sequence: Sequence[PassageKey], places: dict[PassageKey, int]) -> list[int]:
    """Places of the passages with which both begin; a passage that stands there twice ends it."""
    shared: list[int] = []
    for key in sequence:
        place = places.get(key)
        if place is None or place in shared:
            break
        shared.append(place)
    return shared
