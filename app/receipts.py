"""Keeps the record of each reduction for a while, so that its caller can ask what was dropped and why.

A record is read by its own tenant only, and there only by a caller who may read every group that its maker could: the
originals inside are documents that the access stage let through for the maker.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from app.auth import Principal
from app.errors import NotFoundError
from app.settings import ReceiptSettings
from app.waterfall import WaterfallReport
from reducer.prompt import AccessRule, Passage, PromptParts
from reducer.result import BudgetReport, PassageDecision, ReductionResult, StageReport, TurnDecision


class OriginalDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A readable document as received."""

    id: str
    text: str
    title: str | None
    source: str | None
    score: float | None
    acl: list[str] | dict[str, Any] | None
    metadata: dict[str, Any]


class Originals(msgspec.Struct, frozen=True, kw_only=True):
    """What came in, without the documents that were denied."""

    messages: list[dict[str, Any]]
    documents: list[OriginalDocument]


class ReplayInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What decided about a reduction beside the originals, so that it can be done again."""

    policy_version: int | None
    """Of a policy of the database; ``None`` for one of the configuration file."""
    groups: list[str]
    deny_unlabelled: bool
    bypass: bool
    template_kwargs: dict[str, Any]
    tools: list[dict[str, Any]]
    """As received."""
    unsent_tools: list[dict[str, Any]] = []
    """What else was counted like tools."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The whole record of one reduction."""

    receipt_id: str
    created: int
    """Unix time in seconds."""
    policy: str
    budget: BudgetReport
    original_prompt_tokens: int
    prompt_tokens: int
    saved_tokens: int
    pass_through: str | None
    messages: list[dict[str, Any]]
    """The messages sent to the model."""
    tools: list[dict[str, Any]]
    documents: list[PassageDecision]
    denied_documents: int
    turns: list[TurnDecision]
    stages: list[StageReport]
    originals: Originals | None
    originals_omitted: str | None
    """Why there are no originals, if there are none."""
    replay: ReplayInputs | None = None
    """Only where there are originals."""
    waterfall: WaterfallReport | msgspec.UnsetType = msgspec.UNSET
    """Where the time to the first token went, of a request that asked for it; added when that token has come."""


@dataclass(frozen=True, slots=True)
class _Stored:
    tenant_id: str
    groups: frozenset[str]
    created_s: float
    document: bytes


def new_receipt_id() -> str:
    """An id that cannot be guessed."""
    return f"rcpt_{secrets.token_hex(16)}"


def saved_tokens(result: ReductionResult) -> int:
    """Prompt tokens that the reduction took away, never negative."""
    return max(0, result.original_prompt_tokens - result.prompt_tokens)


def encode_receipt(
    receipt_id: str,
    policy: str,
    parts: PromptParts,
    result: ReductionResult,
    settings: ReceiptSettings,
    replay: ReplayInputs | None = None,
) -> bytes:
    """The record as JSON. CPU-heavy for large requests."""
    originals = _originals(parts, result) if settings.include_originals else None
    omitted = None if settings.include_originals else "receipts.include_originals is off"
    receipt = Receipt(
        receipt_id=receipt_id,
        created=int(time.time()),
        policy=policy,
        budget=result.budget,
        original_prompt_tokens=result.original_prompt_tokens,
        prompt_tokens=result.prompt_tokens,
        saved_tokens=saved_tokens(result),
        pass_through=result.pass_through,
        messages=result.messages,
        tools=result.tools,
        documents=result.documents,
        denied_documents=result.denied_documents,
        turns=result.turns,
        stages=result.stages,
        originals=originals,
        originals_omitted=omitted,
        replay=None if originals is None else replay,
    )
    document = msgspec.json.encode(receipt)
    if originals is not None and len(document) > settings.max_bytes_per_tenant:
        omitted = f"the record of {len(document)} bytes is over max_bytes_per_tenant {settings.max_bytes_per_tenant}"
        document = msgspec.json.encode(
            msgspec.structs.replace(receipt, originals=None, originals_omitted=omitted, replay=None)
        )
    return document


def _originals(parts: PromptParts, result: ReductionResult) -> Originals:
    readable = {decision.id for decision in result.documents}
    return Originals(
        messages=[dict(message) for message in parts.messages],
        documents=[_original(passage) for passage in parts.passages if passage.id in readable],
    )


def _original(passage: Passage) -> OriginalDocument:
    return OriginalDocument(
        id=passage.id,
        text=passage.text,
        title=passage.title,
        source=passage.source,
        score=passage.score,
        acl=_acl(passage.acl),
        metadata=dict(passage.metadata),
    )


def _acl(acl: tuple[str, ...] | AccessRule | None) -> list[str] | dict[str, Any] | None:
    """The access label as it was sent."""
    if isinstance(acl, AccessRule):
        rule: dict[str, Any] = {"all_of": list(acl.all_of), "deny": list(acl.deny)}
        return rule if acl.any_of is None else {"any_of": list(acl.any_of), **rule}
    return None if acl is None else list(acl)


def with_waterfall(document: bytes, report: WaterfallReport) -> bytes:
    """A record that ``encode_receipt`` wrote, with what is known once the first token has come."""
    assert document.endswith(b"}"), "a record is a JSON object"
    return document[:-1] + b',"waterfall":' + msgspec.json.encode(report) + b"}"


class ReceiptKeeper(Protocol):
    """Keeps records."""

    def put(self, receipt_id: str, principal: Principal, document: bytes) -> None:
        """Keeps a record in place of an earlier one with this id; returns at once."""
        ...


class ReceiptStore:
    """Records in memory, limited in number, bytes and age; the oldest go first. Used from the event loop only."""

    def __init__(self, settings: ReceiptSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._by_tenant: dict[str, OrderedDict[str, None]] = {}
        self._bytes_by_tenant: dict[str, int] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, receipt_id: str) -> bool:
        return receipt_id in self._stored

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self._num_bytes

    def limit(self, settings: ReceiptSettings) -> None:
        """Takes other limits; what is over them goes at once."""
        self._settings = settings
        for tenant_id in list(self._by_tenant):
            self._trim(tenant_id)
        self._trim_all()

    def put(self, receipt_id: str, principal: Principal, document: bytes) -> None:
        """Keeps a record in place of an earlier one with this id; one over the limits on its own is not kept."""
        settings, tenant_id = self._settings, principal.tenant_id
        if receipt_id in self._stored:
            self._drop(receipt_id)
        if len(document) > min(settings.max_bytes_per_tenant, settings.max_bytes):
            return
        self._stored[receipt_id] = _Stored(tenant_id, principal.groups, self._clock(), document)
        own = self._by_tenant.setdefault(tenant_id, OrderedDict())
        own[receipt_id] = None
        self._bytes_by_tenant[tenant_id] = self._bytes_by_tenant.get(tenant_id, 0) + len(document)
        self._num_bytes += len(document)
        self._trim(tenant_id)
        self._trim_all()

    def get(self, receipt_id: str, principal: Principal) -> bytes:
        """The record as JSON. Raises ``NotFoundError``, the same for one that is not there and one of others."""
        document = self.find(receipt_id, principal.tenant_id, principal.groups)
        if document is None:
            raise NotFoundError(f"No receipt {receipt_id!r} found.", param="receipt_id", code="receipt_not_found")
        return document

    def find(self, receipt_id: str, tenant_id: str, groups: frozenset[str]) -> bytes | None:
        """The record as JSON, if it is here and a caller of this tenant with these groups may read it."""
        self._drop_expired()
        stored = self._stored.get(receipt_id)
        if stored is None or stored.tenant_id != tenant_id or not stored.groups <= groups:
            return None
        return stored.document

    def _trim(self, tenant_id: str) -> None:
        """Drops the tenant's oldest records while it has more than it may."""
        settings, own = self._settings, self._by_tenant[tenant_id]
        while own and (
            len(own) > settings.max_entries_per_tenant
            or self._bytes_by_tenant[tenant_id] > settings.max_bytes_per_tenant
        ):
            self._drop(next(iter(own)))

    def _trim_all(self) -> None:
        """Drops the oldest records of all while they take too much, and those that are too old."""
        while self._num_bytes > self._settings.max_bytes:
            self._drop(next(iter(self._stored)))
        self._drop_expired()

    def _drop_expired(self) -> None:
        oldest_s = self._clock() - self._settings.retention_s
        while self._stored and (first := next(iter(self._stored.items())))[1].created_s <= oldest_s:
            self._drop(first[0])

    def _drop(self, receipt_id: str) -> None:
        stored = self._stored.pop(receipt_id)
        self._num_bytes -= len(stored.document)
        own = self._by_tenant[stored.tenant_id]
        del own[receipt_id]
        self._bytes_by_tenant[stored.tenant_id] -= len(stored.document)
        if not own:
            del self._by_tenant[stored.tenant_id], self._bytes_by_tenant[stored.tenant_id]
