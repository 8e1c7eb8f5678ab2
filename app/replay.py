"""Does a reduction again from its receipt, and says whether the same bytes come out.

The receipt holds the messages that were sent, so those bytes are always at hand. To see that they follow from what came
in, the originals are reduced once more: with the policy version, the groups, the tools and the budget of the record,
and without the access filter's denied documents, which left no trace. The order of documents may have followed the
prompts served before, so the order of the record is offered as one that was served.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from app.compaction import RequestCounter
from app.errors import InvalidRequestError
from app.policies import Policy
from app.receipts import OriginalDocument, Receipt
from reducer.encoder import Encoder
from reducer.errors import ReducerError
from reducer.ordering import OrderMemory, PassageKey, PrefixKey, prefix_key
from reducer.pipeline import Reducer
from reducer.prompt import AccessRule, Budget, Caller, Passage, PromptParts
from reducer.reranker import Reranker


@dataclass(frozen=True, slots=True)
class Replay:
    """A reduction that was done again."""

    sent: bytes
    """The messages of the record as JSON."""
    again: bytes
    """The messages that came out now, as JSON."""
    degraded: tuple[str, ...]
    """Stages of the record that fell back to a cheaper method, e.g. because time ran out."""

    @property
    def is_same(self) -> bool:
        """Whether both are the same bytes."""
        return self.sent == self.again


class _ServedOrder(OrderMemory):
    """Remembers one order, under every beginning."""

    def __init__(self, order: tuple[PassageKey, ...]) -> None:
        super().__init__()
        self._order = order

    def recent(self, prefix: PrefixKey) -> tuple[tuple[PassageKey, ...], ...]:
        """The one order."""
        return (self._order,)


def read_receipt(document: bytes) -> Receipt:
    """The record. Raises ``InvalidRequestError`` for one that cannot be replayed, and says why."""
    receipt = msgspec.json.decode(document, type=Receipt)
    if receipt.originals is None or receipt.replay is None:
        reason = receipt.originals_omitted or "it was written by an older version of firsttoken"
        raise InvalidRequestError(f"Receipt {receipt.receipt_id!r} holds no originals: {reason}.", code="no_originals")
    return receipt


def replay(
    receipt: Receipt,
    tenant: str,
    policy: Policy,
    counter: RequestCounter,
    encoder: Encoder | None,
    reranker: Reranker | None = None,
) -> Replay:
    """Reduces the originals of a record again; CPU-heavy. Raises ``ReducerError`` where they no longer fit."""
    inputs, originals = receipt.replay, receipt.originals
    assert inputs is not None, "read_receipt checks it"
    assert originals is not None, "read_receipt checks it"
    parts = PromptParts(
        messages=tuple(originals.messages),
        tools=tuple(inputs.tools),
        passages=tuple(_passage(document) for document in originals.documents),
    )
    budget = Budget(receipt.budget.max_input_tokens, receipt.budget.source)
    caller = Caller(groups=frozenset(inputs.groups), deny_unlabelled=inputs.deny_unlabelled)
    sent = msgspec.json.encode(receipt.messages)
    again = b""
    failure: ReducerError | None = None
    for memory in (_ServedOrder(_order_of(receipt)), OrderMemory()):
        reducer = Reducer(policy.reducer, counter, encoder, reranker=reranker, order_memory=memory)
        try:
            result = reducer.reduce(parts, budget=budget, caller=caller, bypass=inputs.bypass, cache_scope=tenant)
        except ReducerError as error:
            failure = error
            continue
        again = msgspec.json.encode(result.messages)
        if again == sent:
            break
    if not again and failure is not None:
        raise failure
    return Replay(sent, again, tuple(stage.stage for stage in receipt.stages if stage.degraded is not None))


def _order_of(receipt: Receipt) -> tuple[PassageKey, ...]:
    """What the documents contributed, in the order in which they stand in the prompt."""
    assert receipt.originals is not None, "read_receipt checks it"
    originals = {document.id: document for document in receipt.originals.documents}
    prompt = "\n".join(_texts(receipt.messages))
    placed = []
    for decision in receipt.documents:
        document = originals.get(decision.id)
        if decision.label is None or document is None:
            continue
        text = "\x00".join(document.text[start:end] for start, end in decision.spans)
        placed.append((prompt.find(f"{decision.label} "), prefix_key(document.title or "", text)))
    return tuple(key for _, key in sorted(placed))


def _texts(messages: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            found.append(content)
        elif isinstance(content, list):
            found += [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return found


def _passage(document: OriginalDocument) -> Passage:
    acl: tuple[str, ...] | AccessRule | None = None
    if isinstance(document.acl, list):
        acl = tuple(document.acl)
    elif document.acl is not None:
        any_of = document.acl.get("any_of")
        acl = AccessRule(
            any_of=None if any_of is None else tuple(any_of),
            all_of=tuple(document.acl.get("all_of", ())),
            deny=tuple(document.acl.get("deny", ())),
        )
    return Passage(
        id=document.id,
        text=document.text,
        title=document.title,
        source=document.source,
        score=document.score,
        acl=acl,
        metadata=document.metadata,
    )
