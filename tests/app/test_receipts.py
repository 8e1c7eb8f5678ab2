"""Receipts: own tenant only, limited in number, bytes and age, without denied documents."""

from dataclasses import dataclass

import msgspec
import pytest
from factories_app import ACME_KEY, GLOBEX_KEY, OUTSIDER_KEY, make_settings

from app.auth import Authenticator, Principal
from app.errors import NotFoundError
from app.receipts import ReceiptStore, encode_receipt, new_receipt_id
from app.settings import ReceiptSettings
from reducer.prompt import Passage, PromptParts
from reducer.result import BudgetReport, PassageDecision, ReductionResult


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def principal(key: str = ACME_KEY) -> Principal:
    return Authenticator(make_settings()).authenticate(f"Bearer {key}")


def make_store(clock: Clock | None = None, **settings: int) -> ReceiptStore:
    return ReceiptStore(msgspec.structs.replace(ReceiptSettings(), **settings), clock or Clock())


def test_only_the_own_tenant_reads_a_receipt_and_others_learn_nothing() -> None:
    store = make_store()
    store.put("rcpt_1", principal(), b"{}")
    assert store.get("rcpt_1", principal()) == b"{}"
    with pytest.raises(NotFoundError) as of_others:
        store.get("rcpt_1", principal(GLOBEX_KEY))
    with pytest.raises(NotFoundError) as of_nobody:
        make_store().get("rcpt_1", principal(GLOBEX_KEY))
    assert str(of_others.value) == str(of_nobody.value)


def test_a_key_with_fewer_groups_does_not_read_what_a_key_with_more_has_seen() -> None:
    store = make_store()
    store.put("rcpt_1", principal(), b"{}")
    store.put("rcpt_2", principal(OUTSIDER_KEY), b"{}")
    with pytest.raises(NotFoundError):
        store.get("rcpt_1", principal(OUTSIDER_KEY))
    assert store.get("rcpt_2", principal()) == b"{}"


def test_the_oldest_go_when_a_tenant_has_too_many() -> None:
    store = make_store(max_entries_per_tenant=2)
    for number in range(3):
        store.put(f"rcpt_{number}", principal(), b"{}")
    store.put("other", principal(GLOBEX_KEY), b"{}")
    assert len(store) == 3
    with pytest.raises(NotFoundError):
        store.get("rcpt_0", principal())
    store.get("rcpt_1", principal())


def test_bytes_are_limited_per_tenant_and_in_all() -> None:
    store = make_store(max_bytes_per_tenant=10, max_bytes=15)
    store.put("a", principal(), b"123456")
    store.put("b", principal(), b"123456")
    assert store.num_bytes == 6
    store.put("c", principal(GLOBEX_KEY), b"1234567890")
    assert (len(store), store.num_bytes) == (1, 10)
    store.put("d", principal(), b"x" * 11)
    assert len(store) == 1
    store.get("c", principal(GLOBEX_KEY))


def test_receipts_expire() -> None:
    clock = Clock()
    store = make_store(clock, retention_s=100)
    store.put("a", principal(), b"{}")
    clock.now_s = 99
    store.get("a", principal())
    clock.now_s = 100
    with pytest.raises(NotFoundError):
        store.get("a", principal())
    assert store.num_bytes == 0


def make_result() -> ReductionResult:
    decision = PassageDecision(id="open", action="kept", reason="relevant", tokens_before=1, tokens_after=1)
    return ReductionResult(
        messages=[{"role": "user", "content": "q"}],
        tools=[],
        prompt_tokens=9,
        original_prompt_tokens=7,
        budget=BudgetReport(max_input_tokens=10, source="request"),
        documents=[decision],
        denied_documents=1,
        turns=[],
        stages=[],
    )


PARTS = PromptParts(
    messages=({"role": "user", "content": "q", "x_custom": 1},),
    passages=(Passage(id="open", text="text"), Passage(id="secret", text="classified", acl=("board",))),
)


def test_originals_hold_what_came_in_without_denied_documents() -> None:
    record = msgspec.json.decode(encode_receipt("rcpt_1", "default", PARTS, make_result(), ReceiptSettings()))
    assert record["originals"]["messages"] == [{"role": "user", "content": "q", "x_custom": 1}]
    assert [document["id"] for document in record["originals"]["documents"]] == ["open"]
    assert record["denied_documents"] == 1
    assert "classified" not in str(record)
    assert "secret" not in str(record)


def test_saved_tokens_are_never_negative() -> None:
    record = msgspec.json.decode(encode_receipt("rcpt_1", "default", PARTS, make_result(), ReceiptSettings()))
    assert record["saved_tokens"] == 0


def test_originals_are_left_out_with_a_reason_where_they_are_too_large_or_unwanted() -> None:
    for settings in (ReceiptSettings(max_bytes_per_tenant=300), ReceiptSettings(include_originals=False)):
        record = msgspec.json.decode(encode_receipt("rcpt_1", "default", PARTS, make_result(), settings))
        assert record["originals"] is None
        assert record["originals_omitted"]


def test_ids_are_not_guessable() -> None:
    assert len({new_receipt_id() for _ in range(100)}) == 100
    assert len(new_receipt_id()) == len("rcpt_") + 32
