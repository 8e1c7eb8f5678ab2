"""Replaying a receipt: the same bytes come out of the originals, and a changed record is noticed."""

import msgspec
from factories_app import ByteEncoder, bearer, make_app, make_body, make_documents, make_settings
from litestar.testing import AsyncTestClient

from app.compaction import RequestCounter
from app.policies import PolicyBook
from app.replay import Replay, read_receipt, replay


def replayed(document: bytes) -> Replay:
    receipt = read_receipt(document)
    policy = PolicyBook(make_settings()).get("default")
    assert policy is not None
    return replay(receipt, "acme", policy, RequestCounter(ByteEncoder(), {}), None)


async def receipts_of(*document_orders: list[dict[str, object]]) -> list[bytes]:
    found = []
    async with AsyncTestClient(make_app(make_settings())) as http:
        for documents in document_orders:
            body = make_body(documents=documents, firsttoken={"max_input_tokens": 1200})
            answer = await http.post("/v1/compact", json=body, headers=bearer())
            found.append((await http.get(f"/v1/receipts/{answer.json()['receipt_id']}", headers=bearer())).content)
    return found


async def test_the_originals_give_the_bytes_that_were_sent_also_after_other_prompts() -> None:
    documents = make_documents(12)
    for document in await receipts_of(documents, documents[::-1], documents[4:]):
        outcome = replayed(document)
        assert outcome.again == outcome.sent
        assert outcome.is_same


async def test_a_record_that_was_changed_is_not_the_same() -> None:
    (document,) = await receipts_of(make_documents(12))
    record = msgspec.json.decode(document)
    record["messages"][-1]["content"] += " and more"
    assert not replayed(msgspec.json.encode(record)).is_same
