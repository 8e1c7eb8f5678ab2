"""Access labels of documents on the wire, end to end."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from factories_app import ACME_KEY, OUTSIDER_KEY, bearer, make_app, make_body, make_settings
from litestar.testing import AsyncTestClient

from app.commands.compact import show


@pytest.fixture
async def http() -> AsyncIterator[AsyncTestClient[Any]]:
    async with AsyncTestClient(make_app()) as http:
        yield http


async def compact(http: AsyncTestClient[Any], acl: Any, key: str = ACME_KEY) -> Any:
    documents = [{"id": "a", "text": "Widgets are made in Ghent.", "acl": acl}]
    return await http.post("/v1/compact", json=make_body(documents=documents), headers=bearer(key))


@pytest.mark.parametrize(
    ("acl", "num_denied"),
    [
        ({"any_of": ["staff", "board"]}, 0),
        ({"any_of": ["board"]}, 1),
        ({"any_of": []}, 1),
        ({"all_of": ["staff", "public"]}, 0),
        ({"all_of": ["staff", "board"]}, 1),
        ({"any_of": ["staff"], "deny": ["public"]}, 1),
        ({"any_of": ["staff"], "deny": ["board"]}, 0),
        ({"deny": ["staff"]}, 1),
        ({"deny": ["board"]}, 0),
        ({}, 0),
    ],
)
async def test_rules_admit_the_groups_of_the_key(http: AsyncTestClient[Any], acl: Any, num_denied: int) -> None:
    answer = await compact(http, acl)
    assert answer.status_code == 200, answer.text
    assert answer.json()["denied_documents"] == num_denied
    assert ("Ghent" in answer.text) == (num_denied == 0)


async def test_a_rule_without_readers_is_unlabelled_where_the_tenant_denies_those() -> None:
    async with AsyncTestClient(make_app(make_settings(acme={"deny_unlabelled": True}))) as http:
        denied = await compact(http, {"deny": ["board"]})
        readable = await compact(http, {"any_of": ["staff"], "deny": ["board"]})
    assert [answer.json()["denied_documents"] for answer in (denied, readable)] == [1, 0]


async def test_the_receipt_gives_the_rule_back_as_it_was_sent(http: AsyncTestClient[Any]) -> None:
    rule = {"any_of": ["staff"], "all_of": ["public"], "deny": ["board"]}
    answer = await compact(http, rule)
    receipt = await http.get(f"/v1/receipts/{answer.json()['receipt_id']}", headers=bearer())
    assert receipt.json()["originals"]["documents"][0]["acl"] == rule


@pytest.mark.parametrize("acl", [{"anyof": ["staff"]}, {"any_of": "staff"}, {"deny": [1]}, "staff", 3])
async def test_a_misspelt_rule_is_refused_and_never_read_as_open(http: AsyncTestClient[Any], acl: Any) -> None:
    answer = await compact(http, acl, OUTSIDER_KEY)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("documents[0].acl")
    assert "Ghent" not in answer.text


@pytest.mark.parametrize(("num_denied", "said"), [(0, ""), (1, "1 document denied"), (2, "2 documents denied")])
def test_the_command_line_counts_denied_documents(
    num_denied: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = {"max_input_tokens": 100, "source": "window"}
    show(
        {
            "original_prompt_tokens": 9,
            "prompt_tokens": 9,
            "budget": budget,
            "stages": [],
            "documents": [],
            "denied_documents": num_denied,
        }
    )
    assert [line for line in capsys.readouterr().out.splitlines() if "denied" in line] == [said] * (num_denied > 0)
