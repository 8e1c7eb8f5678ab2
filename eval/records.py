"""What a recall run writes down: what was measured, and apart from it what was scored.

Texts of the data sets stay out: a record names passages by id and character range, and holds the model's short answers.
"""

from typing import Any, Literal

import msgspec

from eval.manifest import Manifest

ArmKind = Literal["reduced", "first", "full", "baseline"]
GroupKind = Literal["language", "length"]


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to build the prompt that is compared with the others."""

    name: str
    kind: ArmKind
    """``reduced``: by the gateway. ``first``: the first whole passages, at least as many tokens as the reduced arm of
    the same budget kept. ``full``: every passage. ``baseline``: chosen by a named method and sent unreduced."""
    budget: float | None = None
    """Share of the passages' tokens (of the history's, in history cases) that may stay; ``None`` sets no limit."""
    policy: str | None = None
    """Policy of a reduced arm; ``None`` is the tenant's."""
    method: str | None = None
    """Method of a baseline arm; see ``eval.selectors``."""


class SkippedArm(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline that was asked for and cannot run here."""

    name: str
    reason: str


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
    labels: dict[str, list[str]] = {}
    """Label in the prompt -> ids of the passages that stand under it."""
    is_empty: bool = False
    """Nothing of the passages (of the history) is in the messages: a failure, and recall 0."""
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
    from_cache: bool = False
    """Made by an earlier run from the same messages; its times are not this run's."""
    does_not_fit: bool = False
    """The prompt is longer than the window: there is no answer."""
    error: str | None = None


class AnswerScore(msgspec.Struct, frozen=True, kw_only=True):
    """The model's answer against the accepted ones."""

    arm: str
    contains: float
    exact: float = 0.0
    f1: float = 0.0
    num_cited: int = 0
    num_cited_valid: int = 0
    """Cited labels that name a passage of the prompt."""
    num_cited_supporting: int = 0
    """Those whose passage is evidence or states an accepted answer."""
    judge: float | None = None
    """Verdict of the judge model; ``None`` without one. A verdict that failed is 0."""
    judge_error: str | None = None


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


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """An arm on the cases of one language or one length."""

    kind: GroupKind
    name: str
    num_cases: int
    answer: Score | None
    evidence: Score | None
    contains: Score | None
    tokens_kept: float | None


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the recall table."""

    arm: Arm
    num_cases: int
    num_errors: int
    num_unproven: int
    """Passages reported as kept that were not in the messages, over all cases."""
    num_degraded: int
    """Cases in which a stage fell back to a cheaper method."""
    num_empty: int = 0
    """Cases of which nothing was left in the prompt; they count as failures."""
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
    groups: list[GroupSummary] = []
    """By language and by length of the full prompt."""


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
    num_needed: int | None = None
    """Cases at which a true difference of this size is found four times in five; ``None`` where there is none."""
    detectable: float | None = None
    """Smallest true difference that this many cases find four times in five: a smaller one is inside the noise."""


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
    exact: Score | None = None
    f1: Score | None = None
    num_cited: int = 0
    """Labels cited by all answers of the arm."""
    citation_validity: float | None = None
    """Share of them that name a passage of the prompt; ``None`` without citations."""
    citation_support: float | None = None
    """Share of them whose passage is evidence or states an accepted answer."""
    judge: Score | None = None
    judge_kappa: float | None = None
    """Cohen's kappa between judge and containment: 1 is agreement, 0 what chance gives; ``None`` where undefined."""
    num_judge_failures: int = 0
    num_from_cache: int = 0


class GateVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a threshold says of one arm."""

    threshold: str
    arm: str
    outcome: Literal["pass", "fail", "undecided"]
    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""


class RecallReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run. ``cases`` go to a file of their own beside it."""

    kind: Literal["recall"] = "recall"
    manifest: Manifest
    arms: list[ArmSummary]
    comparisons: list[Comparison]
    answers: list[AnswerSummary] = []
    num_count_mismatches: int = 0
    """Answers whose ``usage.prompt_tokens`` differ from what compaction had announced."""
    first_errors: list[str] = []
    """The first few errors, word for word."""
    cases_file: str | None = None
    skipped: list[SkippedArm] = []
    judge_model: str | None = None
    gate: list[GateVerdict] = []

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
