"""What goes to an upstream is the client's JSON, byte by byte, but for what the gateway decides."""

import json
from typing import Any

import msgspec
import pytest

from app.backend_settings import BackendSettings, Flavour, ReplicaSettings
from app.backends.upstream_body import RelayRequest, routing_key, upstream_body

ODD_MESSAGE = (
    '{"role": "user", "name":"A\\u00e9", "x_number": 1.50, "content": [{"type":"text","text":"What is \\u4f60?"}, '
    '{"type":"image_url", "image_url": {"url":"data:image/png;base64,AA==","detail":"low"}, "x": 1e2}]}'
)
SYSTEM = '{"role":"system",  "content":"Be brief.", "x_big": 123456789012345678901234567890}'


def make_settings(flavour: Flavour = "vllm", **changes: Any) -> BackendSettings:
    replicas = (ReplicaSettings(url="http://replica/v1"),)
    return BackendSettings(kind="openai", flavour=flavour, model="m", replicas=replicas, **changes)


def make_request(body: str, **changes: Any) -> RelayRequest:
    raw = msgspec.json.decode(body)
    fields: dict[str, Any] = {
        "request_id": "req_1",
        "body": body.encode(),
        "messages": raw["messages"],
        "tools": raw.get("tools") or (),
        "cache_salt": "salt",
        "streams": bool(raw.get("stream")),
    }
    return RelayRequest(**fields | changes)


def send(request: RelayRequest, settings: BackendSettings | None = None) -> str:
    return upstream_body(request, settings or make_settings()).decode()


def test_everything_unknown_keeps_its_bytes() -> None:
    body = (
        f'{{"model":"default","messages":[{SYSTEM}, {ODD_MESSAGE}],"temperature":0.70,'
        f'"x_custom":{{"b": 1e400, "a":[1.0]}},'
        '"seed":-0,"response_format": {"type":"json_schema","json_schema":{"name":"n","schema":{"maximum": 1E3}}}}'
    )
    request = RelayRequest("r", body.encode(), [{"role": "user", "content": "x"}], (), "salt", False)
    sent = send(request)
    for part in ('"temperature":0.70', '"x_custom":{"b": 1e400, "a":[1.0]}', '"seed":-0', '"maximum": 1E3'):
        assert part in sent


def test_untouched_messages_are_the_clients_bytes() -> None:
    body = f'{{"model":"default","messages":[{SYSTEM}, {ODD_MESSAGE}]}}'
    assert f'"messages":[{SYSTEM}, {ODD_MESSAGE}]' in send(make_request(body))


def test_documents_in_front_of_a_message_leave_its_other_bytes_alone() -> None:
    body = f'{{"model":"default","messages":[{SYSTEM}, {ODD_MESSAGE}]}}'
    messages = json.loads(body)["messages"]
    block = {"type": "text", "text": "<documents>\n…"}
    changed = {**messages[1], "content": [block, *messages[1]["content"]]}
    sent = send(make_request(body, messages=[messages[0], changed]))
    assert SYSTEM in sent
    assert '"name":"A\\u00e9","x_number":1.50' in sent
    assert '{"type":"text","text":"What is \\u4f60?"}' in sent
    assert '{"type":"image_url", "image_url": {"url":"data:image/png;base64,AA==","detail":"low"}, "x": 1e2}' in sent
    assert json.loads(sent)["messages"][1] == changed


def test_dropped_turns_leave_the_others_as_they_were() -> None:
    first, second = (
        '{"role":"assistant", "content":null,"refusal":"No\\u002e"}',
        '{"role":"user","content":"And\\u003f"}',
    )
    body = f'{{"model":"default","messages":[{{"role":"user","content":"gone"}},{first},{second}]}}'
    sent = send(make_request(body, messages=json.loads(f"[{first},{second}]")))
    assert f'"messages":[{first},{second}]' in sent


@pytest.mark.parametrize(
    ("flavour", "path"), [("vllm", ["cache_salt"]), ("sglang", ["cache_salt"]), ("dynamo", []), ("openai", [])]
)
def test_the_callers_isolation_is_discarded_and_the_gateways_is_set(flavour: Flavour, path: list[str]) -> None:
    body = json.dumps(
        {
            "model": "default",
            "messages": [{"role": "user", "content": "x"}],
            "cache_salt": "victim",
            "extra_key": "victim",
            "nvext": {"cache_salt": "victim", "ignore_eos": True},
        }
    )
    sent = json.loads(send(make_request(body), make_settings(flavour)))
    assert "victim" not in json.dumps(sent)
    assert sent["nvext"] == {"ignore_eos": True}
    assert sent.get("cache_salt") == ("salt" if path else None)


def test_the_salt_goes_where_the_configuration_says() -> None:
    body = '{"model":"default","messages":[{"role":"user","content":"x"}],"nvext":{"a":1.0}}'
    sent = send(make_request(body), make_settings("dynamo", cache_salt_field="nvext.cache_salt"))
    assert '"nvext":{"a":1.0,"cache_salt":"salt"}' in sent
    assert make_settings("dynamo").salt_header == "x-tenant-id"
    assert make_settings("vllm").salt_header is None


def test_the_gateways_own_fields_stay_here_and_usage_is_asked_for() -> None:
    body = (
        '{"model":"default","messages":[{"role":"user","content":"x"}],"documents":[],"firsttoken":{},'
        '"stream":true,"stream_options":{"include_obfuscation":false}}'
    )
    sent = json.loads(send(make_request(body)))
    assert sent["model"] == "m"
    assert sent["stream_options"] == {"include_obfuscation": False, "include_usage": True}
    assert {"documents", "firsttoken"}.isdisjoint(sent)


def test_max_tokens_is_written_only_where_the_gateway_limits_it() -> None:
    body = '{"model":"default","messages":[{"role":"user","content":"x"}],"max_completion_tokens":9000}'
    assert '"max_completion_tokens":9000' in send(make_request(body))
    assert json.loads(send(make_request(body, max_tokens=50)))["max_completion_tokens"] == 50
    plain = '{"model":"default","messages":[{"role":"user","content":"x"}]}'
    assert json.loads(send(make_request(plain, max_tokens=50)))["max_tokens"] == 50
    assert json.loads(send(make_request(plain, max_tokens=50), make_settings("openai")))["max_completion_tokens"] == 50


def test_tools_keep_their_bytes_unless_they_were_reordered() -> None:
    tool = '{"type":"function","function":{"name":"f","parameters":{"maximum": 1E3}}}'
    body = f'{{"model":"default","messages":[{{"role":"user","content":"x"}}],"tools":[{tool}]}}'
    assert f'"tools":[{tool}]' in send(make_request(body))
    swapped = [{"function": json.loads(tool)["function"], "type": "function"}]
    assert json.loads(send(make_request(body, tools=swapped)))["tools"] == swapped


def test_requests_with_one_beginning_share_a_key_and_tenants_do_not() -> None:
    def key(question: str, **changes: Any) -> bytes:
        messages = [{"role": "system", "content": "S" * 50}, {"role": "user", "content": question}]
        hint = changes.pop("hint", None)
        body = json.dumps({"model": "default", "messages": messages, "prompt_cache_key": hint})
        return routing_key(make_request(body, **changes))

    assert key("a") == key("b")
    assert key("a") != key("a", cache_salt="other")
    assert key("a") != key("a", hint="user-7")
    assert key("a") != key("a", tools=[{"type": "function", "function": {"name": "f"}}])
