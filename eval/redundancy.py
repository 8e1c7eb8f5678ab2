"""How well copies were removed, and whether passages that only look like copies stayed.

Judged on what the deduplication merged: a passage that is left out because it is irrelevant says nothing about copies.
Of each cluster of copies one passage must stay; a passage merged into another cluster is a loss.
"""

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from eval.samples import Case


@dataclass(frozen=True, slots=True)
class RedundancyCounts:
    """Counts of one case, or added up over many."""

    removed_right: int = 0
    """Removed chunks of a cluster of which another chunk stayed."""
    removed_wrong: int = 0
    left_in: int = 0
    """Chunks beyond the first of a cluster that stayed."""
    near_pairs: int = 0
    """Pairs that look alike and state different facts."""
    near_pairs_kept: int = 0
    """Those of which deduplication left both sides."""

    def __add__(self, other: "RedundancyCounts") -> "RedundancyCounts":
        return RedundancyCounts(
            removed_right=self.removed_right + other.removed_right,
            removed_wrong=self.removed_wrong + other.removed_wrong,
            left_in=self.left_in + other.left_in,
            near_pairs=self.near_pairs + other.near_pairs,
            near_pairs_kept=self.near_pairs_kept + other.near_pairs_kept,
        )

    @property
    def precision(self) -> float | None:
        """Right removals among all; ``None`` where nothing was removed."""
        removed = self.removed_right + self.removed_wrong
        return self.removed_right / removed if removed else None

    @property
    def recall(self) -> float | None:
        """Right removals among those there were to make; ``None`` where there were none."""
        copies = self.removed_right + self.left_in
        return self.removed_right / copies if copies else None

    @property
    def near_kept(self) -> float | None:
        """Share of the near pairs of which both sides stayed; ``None`` without pairs."""
        return self.near_pairs_kept / self.near_pairs if self.near_pairs else None


def has_redundancy_labels(case: Case) -> bool:
    """Whether the case's chunks carry labels of copies or near pairs."""
    return any(chunk.dup_of or chunk.near_of for chunk in case.chunks)


def redundancy_counts(case: Case, removed: AbstractSet[str]) -> RedundancyCounts:
    """Counts for the chunks that deduplication ``removed``."""
    sizes = Counter(chunk.cluster for chunk in case.chunks)
    staying = Counter(chunk.cluster for chunk in case.chunks if chunk.id not in removed)
    gone = [chunk for chunk in case.chunks if chunk.id in removed]
    right = sum(staying[chunk.cluster] > 0 for chunk in gone)
    clusters = {chunk.id: chunk.cluster for chunk in case.chunks}
    pairs = [(chunk.id, clusters[chunk.near_of]) for chunk in case.chunks if chunk.near_of in clusters]
    return RedundancyCounts(
        removed_right=right,
        removed_wrong=len(gone) - right,
        left_in=sum(staying[cluster] - 1 for cluster, size in sizes.items() if size > 1 and staying[cluster] > 1),
        near_pairs=len(pairs),
        near_pairs_kept=sum(near not in removed and staying[cluster] > 0 for near, cluster in pairs),
    )
