"""The stages of the time to the first token on the real engine: nearly all of it has a name."""

from typing import Any

import httpx
import pytest
from factories_gateway import RunningGateway, missing_models, running_gateway

WORDS = "The harbour of Ghent has forty cranes, and number {} was painted in the year {}. It lifts {} tonnes. "

pytestmark = pytest.mark.skipif(missing_models() is not None, reason=str(missing_models()))


@pytest.fixture(scope="module")
def gateway() -> Any:
    with running_gateway() as running:
        yield running


def ask(gateway: RunningGateway, number: int, **own: Any) -> dict[str, Any]:
    documents = [
        {"id": f"d{i}", "text": "".join(WORDS.format(i * 10 + j, 1900 + number, i * j) for j in range(8))}
        for i in range(12)
    ]
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": f"Which crane lifts {number} tonnes?"}],
        "documents": documents,
        "max_tokens": 4,
        "temperature": 0,
        "firsttoken": {"waterfall": True, **own},
    }
    headers = {"Authorization": "Bearer sk-acme-demo"}
    response = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    answer: dict[str, Any] = response.raise_for_status().json()["firsttoken"]
    return answer


def test_the_stages_sum_to_the_time_to_the_first_token_and_hardly_any_is_without_a_name(
    gateway: RunningGateway,
) -> None:
    ask(gateway, 0)
    total_ms = other_ms = 0.0
    for number in range(1, 6):
        answer = ask(gateway, number, bypass=number % 2 == 0)
        parts = {part["stage"]: part["ms"] for part in answer["waterfall"]["stages"]}
        told_us = sum(round(ms * 1000) for ms in parts.values())
        assert told_us == round(answer["timings_ms"]["first_token"] * 1000)
        assert min(parts.values()) > 0
        assert {"read_body", "tokenize", "engine_transport", "prefill"} <= set(parts)
        assert parts["prefill"] == pytest.approx(answer["timings_ms"]["prefill"], rel=0.02, abs=2)
        total_ms += answer["waterfall"]["ttft_ms"]
        other_ms += parts.get("other", 0.0)
    assert other_ms / total_ms < 0.03
