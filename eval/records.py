"""What a recall run writes down: what was measured, and apart from it what was scored.

Texts of the data sets stay out: a record names passages by id and character range, and holds the model's short answers.
"""

from typing import Any, Literal

import msgspec

from eval.manifest import Manifest

ArmKind = Literal["reduced", "first", "full"]


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to build the prompt that is compared with the others."""

    name: str
    kind: ArmKind
    """``reduced``: by the gateway. ``first``: the first whole passages, at least as many tokens as the reduced arm of
    the same budget kept. ``full``: every passage."""
    budget: float | None = None
    """Share of the passages' tokens (of the history's, in history cases) that may stay; ``None`` sets no limit."""


class CompactionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway made of one case in one arm."""

    arm: str
    max_input_tokens: int | None = None
    """The limit that was sent."""
    fixed_tokens: int = 0
    """Prompt tokens of the same request without what the budget is about."""
    full_tokens: int = 0
    """Tokens of the passages (of the history) before reduction."""
    prompt_tokens: int = 0
    call_ms: float = 0.0
    """Time of the whole call at the client."""
    stage_ms: float = 0.0
    """Time of the reducer's stages as the gateway reports it."""
    kept: dict[str, list[tuple[int, int]]] = {}
    """Passage id -> character ranges that stand in the returned messages."""
    merged: dict[str, str] = {}
    """Passage id -> the passage it was merged into."""
    dropped: dict[str, str] = {}
    """Passage id -> reason."""
    unproven: list[str] = []
    """Passages reported as kept whose text is not in the returned messages; they count as dropped."""
    degraded: dict[str, str] = {}
    """Stage -> why it fell back to a cheaper method."""
    error: str | None = None
    """The request failed; the arm scores 0 on this case."""


class CaseScore(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one case in one arm; ``None`` where the case has nothing to score by."""

    arm: str
    answer: float | None
    evidence: float | None
    support: float | None
    gold_text: float | None
    tokens_kept: float


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said to one case in one arm."""

    arm: str
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_ms: float | None = None
    total_ms: float = 0.0
    finish_reason: str | None = None
    does_not_fit: bool = False
    """The prompt is longer than the window: there is no answer."""
    error: str | None = None


class AnswerScore(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model's answer contains an accepted one."""

    arm: str
    contains: float


class CaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One case: measurements, then scores."""

    id: str
    lang: str
    compactions: list[CompactionRecord] = []
    answers: list[AnswerRecord] = []
    scores: list[CaseScore] = []
    answer_scores: list[AnswerScore] = []


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over cases with its 95 % interval."""

    mean: float
    low: float
    high: float
    method: str
    num_cases: int


class Redundancy(msgspec.Struct, frozen=True, kw_only=True):
    """Removal of copies, added up over the cases; see ``eval.redundancy``."""

    precision: float | None
    recall: float | None
    near_kept: float | None
    removed_right: int
    removed_wrong: int
    left_in: int
    near_pairs: int


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the recall table."""

    arm: Arm
    num_cases: int
    num_errors: int
    num_unproven: int
    """Passages reported as kept that were not in the messages, over all cases."""
    num_degraded: int
    """Cases in which a stage fell back to a cheaper method."""
    answer: Score | None
    evidence: Score | None
    support: Score | None
    gold_text: float | None
    """Mean share of the kept gold passages' text that is in the prompt; the rest was trimmed."""
    tokens_kept: float
    """Mean share of the tokens of the passages (of the history) that stayed."""
    prompt_tokens: float | None
    """Median; ``None`` for arms that no gateway built."""
    reduce_ms_median: float | None
    reduce_ms_p90: float | None
    redundancy: Redundancy | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``arm - baseline`` on the same cases."""

    metric: str
    arm: str
    baseline: str
    num_pairs: int
    difference: float
    low: float
    high: float
    only_arm: int
    only_baseline: int
    mcnemar_p: float


class AnswerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the answers table."""

    arm: Arm
    num_cases: int
    num_errors: int
    num_does_not_fit: int
    contains: Score
    """Over all cases; no answer counts as a wrong one."""
    contains_where_full_fits: Score | None
    """Over the cases whose full prompt fits into the window."""
    prompt_tokens: float | None
    """Median over the cases whose full prompt fits, as are the figures below."""
    cached_tokens: float | None
    """Mean; prompts are not all cold where it is above a few blocks."""
    ttft_ms_median: float | None
    ttft_ms_p90: float | None


class RecallReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run. ``cases`` go to a file of their own beside it."""

    manifest: Manifest
    arms: list[ArmSummary]
    comparisons: list[Comparison]
    answers: list[AnswerSummary] = []
    num_count_mismatches: int = 0
    """Answers whose ``usage.prompt_tokens`` differ from what compaction had announced."""
    first_errors: list[str] = []
    """The first few errors, word for word."""
    cases_file: str | None = None

    @property
    def num_errors(self) -> int:
        """Failed requests of all kinds."""
        return sum(arm.num_errors for arm in self.arms) + sum(arm.num_errors for arm in self.answers)


def encode_cases(cases: list[CaseRecord]) -> bytes:
    """One JSON object a line."""
    return b"\n".join(msgspec.json.encode(case) for case in cases) + b"\n"


def encode_report(report: Any) -> bytes:
    """Indented JSON for people and diffs."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
