"""The working state of one request on its way through the stages."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reducer.deadline import Deadline
from reducer.fitting import Fitted
from reducer.history import Conversation, HistoryOutcome
from reducer.ordering import OrderMemory, PrefixKey
from reducer.prefix import Prepared
from reducer.prompt import Budget, Passage, PromptParts
from reducer.rank import Query
from reducer.reranker import Reranker
from reducer.result import StageReport
from reducer.stage import Candidate, Filtered, Selected, whole_spans
from reducer.summary import Summarizer, SummaryMemory
from reducer.template import render_heading
from reducer.tokens import CachedCounter, TokenCounter


@dataclass(slots=True)
class Run:
    """The working state of one request."""

    prepared: Prepared
    budget: Budget
    conversation: Conversation
    counter: CachedCounter
    candidates: tuple[Candidate, ...]
    unreduced: list[dict[str, Any]]
    """The prompt with every readable passage and turn."""
    original_tokens: int
    num_denied: int
    query: Query
    history: HistoryOutcome
    memory: SummaryMemory | None = None
    summarizer: Summarizer | None = None
    reranker: Reranker | None = None
    planned_history: int | None = None
    """Tokens the record of older turns was first made for; less for the rest does not change it."""
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    order_memory: OrderMemory | None = None
    order_scope: str = ""
    order_prefix: PrefixKey | None = None
    """Under which the order of the passages is remembered, if it is."""
    arrange: Callable[[Sequence[Selected]], list[Selected]] = list
    """The order in which passages are written."""
    arranged: Sequence[Selected] = ()
    """What is written, in the order in which it is."""
    num_free: int = 0
    """Tokens beside the protected part."""
    turn_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of each history message, its share of the template included."""
    document_tokens: int = 0
    """Tokens of the passages still in the running, labels included."""
    history_tokens: int = 0
    """Tokens of the history still in the running."""
    running: Sequence[Candidate] = ()
    filtered: list[Filtered] = field(default_factory=list)
    fitted: Fitted | None = None
    is_late: bool = False
    """Whether the deadline passed, or would have."""
    reports: list[StageReport] = field(default_factory=list)
    is_unranked: bool = False
    """Whether passages have no scores because the rank stage failed: they are chosen in the order given."""
    keeps_recent: bool = False
    """Whether the history is its last turns that fit, because the history stage failed."""
    template_failures: list[str] = field(default_factory=list)
    """What of the template's preparation failed and was left out."""

    @property
    def parts(self) -> PromptParts:
        """The request, its stable part prepared."""
        return self.prepared.parts

    @property
    def num_tokens(self) -> int:
        """Tokens of passages and history that are still in the running."""
        return self.document_tokens + self.history_tokens


def make_candidate(position: int, passage: Passage, counter: TokenCounter) -> Candidate:
    """The passage as it enters the first stage, its tokens counted once; a score that is no finite number is none."""
    if passage.score is not None and not math.isfinite(passage.score):
        passage = replace(passage, score=None)
    return Candidate(
        passage=passage,
        position=position,
        num_tokens=counter.count_text(passage.text),
        num_label_tokens=counter.count_text(render_heading(f"[{position + 1}]", passage.title)),
        sources=(passage.id,),
    )


def keep_whole(candidate: Candidate, reason: str) -> Selected:
    """The passage with its whole text."""
    return Selected(candidate, whole_spans(candidate.passage.text), candidate.num_tokens, reason)


def document_tokens_of(candidates: Sequence[Candidate]) -> int:
    return sum(candidate.num_tokens + candidate.num_label_tokens for candidate in candidates)
