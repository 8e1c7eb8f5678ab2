"""``/admin/v1``: operators alone, and changes that the next request sees; receipts and usage that outlive a gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories_app import ACME_KEY, EchoBackend, bearer, make_app, make_body, make_documents
from factories_storage import ADMIN_KEY, make_storage_settings
from litestar.testing import AsyncTestClient

from app.admin_access import is_admin_key
from app.settings import ReceiptSettings, Settings

ADMIN = bearer(ADMIN_KEY)
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def client(settings: Settings) -> AsyncIterator[AsyncTestClient[Any]]:
    async with AsyncTestClient(make_app(settings, EchoBackend())) as http:
        yield http


async def make_tenant(http: AsyncTestClient[Any], name: str = "initech", **fields: Any) -> str:
    """A tenant with a key; returns the key."""
    created = await http.post("/admin/v1/tenants", json={"name": name, "groups": ["staff"], **fields}, headers=ADMIN)
    assert created.status_code == 201, created.text
    body = {"name": "backend", "groups": ["staff"]}
    issued = await http.post(f"/admin/v1/tenants/{name}/keys", json=body, headers=ADMIN)
    assert issued.status_code == 201, issued.text
    return str(issued.json()["key"])


async def test_only_an_admin_key_opens_it(tmp_path: Path) -> None:
    async with client(make_storage_settings(tmp_path)) as http:
        answers = [await http.get("/admin/v1/tenants", headers=bearer(key)) for key in ("sk-none", ACME_KEY, ADMIN_KEY)]
        without = await http.get("/admin/v1/tenants")
        as_tenant = await http.get("/v1/models", headers=ADMIN)
    assert [answer.status_code for answer in (*answers, without, as_tenant)] == [401, 403, 200, 401, 401]
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    assert answers[1].json()["error"]["type"] == "permission_error"


def test_an_admin_key_is_compared_with_every_known_one() -> None:
    assert is_admin_key("b" * 64, ("a" * 64, "b" * 64))
    assert not is_admin_key("c" * 64, ("a" * 64, "b" * 64))
    assert not is_admin_key("c" * 64, ())


async def test_a_new_key_works_at_once_and_a_revoked_one_no_longer(tmp_path: Path) -> None:
    async with client(make_storage_settings(tmp_path)) as http:
        key = await make_tenant(http)
        first = await http.post(CHAT, json=make_body(), headers=bearer(key))
        rotated = await http.post("/admin/v1/tenants/initech/keys/backend/rotate", json={}, headers=ADMIN)
        both = [
            (await http.post(CHAT, json=make_body(), headers=bearer(k))).status_code
            for k in (key, rotated.json()["key"])
        ]
        listed = (await http.get("/admin/v1/tenants/initech/keys", headers=ADMIN)).json()["data"]
        await http.delete("/admin/v1/tenants/initech/keys/backend", headers=ADMIN)
        after = await http.post(CHAT, json=make_body(), headers=bearer(key))
    assert (first.status_code, both, after.status_code) == (200, [200, 200], 401)
    assert len(listed) == 2
    assert all("key" not in entry and "digest" not in entry for entry in listed)


async def test_a_budget_holds_from_the_next_request_on(tmp_path: Path) -> None:
    async with client(make_storage_settings(tmp_path)) as http:
        key = await make_tenant(http)
        before = await http.post(CHAT, json=make_body(), headers=bearer(key))
        put = await http.put("/admin/v1/tenants/initech/budgets/day", json={"input_tokens": 40}, headers=ADMIN)
        first, second = [await http.post(CHAT, json=make_body(), headers=bearer(key)) for _ in range(2)]
    assert (before.status_code, put.status_code) == (200, 200)
    assert "x-ratelimit-limit-tokens" not in before.headers
    assert [first.status_code, second.status_code] == [429, 429]  # 34 tokens were used before it was set
    assert "input tokens per day: limit 40, used 34, requested 34" in first.json()["error"]["message"]


async def test_mistakes_of_operators_name_the_field(tmp_path: Path) -> None:
    async with client(make_storage_settings(tmp_path)) as http:
        await make_tenant(http)
        answers = [
            await http.post("/admin/v1/tenants", json={"name": "initech"}, headers=ADMIN),
            await http.post("/admin/v1/tenants", json={"name": "acme"}, headers=ADMIN),
            await http.post("/admin/v1/tenants", json={"name": "x", "max_input_token": 1}, headers=ADMIN),
            await http.post("/admin/v1/tenants", json={"name": " "}, headers=ADMIN),
            await http.patch("/admin/v1/tenants/acme", json={"max_input_tokens": 1}, headers=ADMIN),
            await http.patch("/admin/v1/tenants/nobody", json={}, headers=ADMIN),
            await http.put("/admin/v1/tenants/initech/budgets/week", json={"tokens": 1}, headers=ADMIN),
            await http.put("/admin/v1/tenants/initech/budgets/day", json={}, headers=ADMIN),
            await http.get("/admin/v1/usage?since=yesterday", headers=ADMIN),
        ]
    assert [answer.status_code for answer in answers] == [409, 409, 400, 400, 400, 404, 400, 400, 400]
    assert "max_input_token" in answers[2].json()["error"]["message"]


async def test_a_policy_of_the_database_is_used_from_the_next_request_on(tmp_path: Path) -> None:
    async with client(make_storage_settings(tmp_path)) as http:
        body = make_body(documents=make_documents(20), firsttoken={"policy": "lean"})
        before = await http.post("/v1/compact", json=body, headers=bearer())
        put = {"settings": {"max_input_tokens": 400}}
        await http.put("/admin/v1/policies/lean", json=put, headers=ADMIN)
        after = await http.post("/v1/compact", json=body, headers=bearer())
        receipt = await http.get(f"/v1/receipts/{after.json()['receipt_id']}", headers=bearer())
    assert (before.status_code, after.status_code) == (400, 200)
    assert after.json()["budget"] == {"max_input_tokens": 400, "source": "policy"}
    assert receipt.json()["replay"]["policy_version"] == 1


async def test_a_policy_under_the_recall_floor_is_refused(tmp_path: Path) -> None:
    async with client(make_storage_settings(tmp_path)) as http:
        for name, recall in (("good", 0.99), ("poor", 0.8)):
            put = {"settings": {"measured_recall": recall}}
            await http.put(f"/admin/v1/policies/{name}", json=put, headers=ADMIN)
        key = await make_tenant(http, policy="good", recall_floor=0.95)
        answers = [
            await http.post("/v1/compact", json=make_body(firsttoken={"policy": name}), headers=bearer(key))
            for name in ("good", "poor", "default")
        ]
    assert [answer.status_code for answer in answers] == [200, 400, 400]
    assert answers[1].json()["error"]["code"] == "recall_floor"


async def test_receipts_and_usage_outlive_the_gateway(tmp_path: Path) -> None:
    settings = make_storage_settings(tmp_path)
    async with client(settings) as http:
        key = await make_tenant(http)
        body = make_body(documents=make_documents(20), firsttoken={"max_input_tokens": 500})
        answer = await http.post(CHAT, json=body, headers=bearer(key))
        receipt_id = answer.json()["firsttoken"]["receipt_id"]
        receipt = await http.get(f"/v1/receipts/{receipt_id}", headers=bearer(key))
    async with client(settings) as http:
        again = await http.get(f"/v1/receipts/{receipt_id}", headers=bearer(key))
        of_others = await http.get(f"/v1/receipts/{receipt_id}", headers=bearer())
        unknown = await http.get("/v1/receipts/rcpt_0", headers=bearer())
        usage = (await http.get("/admin/v1/usage?tenant=initech", headers=ADMIN)).json()["data"]
        listed = (await http.get("/admin/v1/receipts?tenant=initech", headers=ADMIN)).json()["data"]
    assert again.content == receipt.content
    assert (of_others.status_code, unknown.status_code) == (404, 404)
    (row,) = usage
    used = answer.json()["usage"]
    assert (row["requests"], row["input_tokens"], row["output_tokens"]) == (
        *(1, used["prompt_tokens"]),
        used["completion_tokens"],
    )
    assert row["saved_tokens"] == answer.json()["firsttoken"]["saved_tokens"] > 0
    assert [entry["id"] for entry in listed] == [receipt_id]


async def test_the_oldest_receipts_go_when_a_tenant_has_too_many(tmp_path: Path) -> None:
    settings = make_storage_settings(tmp_path, receipts=ReceiptSettings(max_entries_per_tenant=3))
    async with client(settings) as http:
        ids = [
            (await http.post("/v1/compact", json=make_body(), headers=bearer())).json()["receipt_id"] for _ in range(5)
        ]
        listed = (await http.get("/admin/v1/receipts", headers=ADMIN)).json()["data"]
    assert [entry["id"] for entry in listed] == ids[:1:-1]


async def test_receipts_expire_in_the_database_as_well(tmp_path: Path) -> None:
    settings = make_storage_settings(tmp_path)
    async with client(settings) as http:
        receipt_id = (await http.post("/v1/compact", json=make_body(), headers=bearer())).json()["receipt_id"]
    short = msgspec.structs.replace(settings, receipts=ReceiptSettings(retention_s=0.001))
    async with client(short) as http:
        assert (await http.get(f"/v1/receipts/{receipt_id}", headers=bearer())).status_code == 404
        assert (await http.get("/admin/v1/receipts", headers=ADMIN)).json()["data"] == []
    async with client(settings) as http:  # swept by the gateway before
        assert (await http.get(f"/v1/receipts/{receipt_id}", headers=bearer())).status_code == 404


@pytest.mark.parametrize("name", ["", " ", "a b", "x" * 65, "../x"])
async def test_a_tenant_has_a_name(tmp_path: Path, name: str) -> None:
    async with client(make_storage_settings(tmp_path)) as http:
        answer = await http.post("/admin/v1/tenants", json={"name": name}, headers=ADMIN)
    assert answer.status_code == 400
