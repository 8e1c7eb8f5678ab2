"""The served model summarises older turns: real engine in its own process, real template and tokenizer."""

from typing import Any

import httpx
import pytest
from factories_app import bearer
from factories_gateway import missing_models, running_gateway

from reducer.blocks import SUMMARY_MARK

pytestmark = pytest.mark.skipif(missing_models() is not None, reason=str(missing_models()))

CONFIG = """
[engine.cache]
memory_gib = 0.5

[policies.model.reducer.history]
summarizer = "model"
summarizer_timeout_s = 120.0
"""


def chat() -> list[dict[str, Any]]:
    """Some facts, then talk without any."""
    turns = ["Case QX-417-KD is due on March 6th. Do not push and do not open a PR.", "Understood, it is noted."]
    topics = ("the old garden", "fresh bread", "long walks", "wooden boats", "the quiet river", "tall trees")
    turns += [
        f"Yesterday my neighbour told me a story about {topic} and how people used to live with it, "
        "which I found touching and would like to hear again on another evening."
        for topic in topics * 3
    ]
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(turns)]


def test_the_served_model_summarises_and_no_fact_is_lost() -> None:
    body = {
        "model": "default",
        "messages": [*chat(), {"role": "user", "content": "When is the case due?"}],
        "firsttoken": {"policy": "model", "max_input_tokens": 420},
        "max_tokens": 8,
    }
    with (
        running_gateway(CONFIG) as gateway,
        httpx.Client(base_url=gateway.url, headers=bearer(), timeout=240) as http,
    ):
        first = http.post("/v1/compact", json=body)
        again = http.post("/v1/chat/completions", json=body)
    assert first.status_code == 200, first.text
    assert again.status_code == 200, again.text
    answer = first.json()
    history = next(stage for stage in answer["stages"] if stage["stage"] == "history")
    text = "\n".join(message["content"] for message in answer["messages"])
    assert answer["prompt_tokens"] <= 420
    for fact in ("QX-417-KD", "March 6th", "Do not push and do not open a PR"):
        assert fact in text
    assert (SUMMARY_MARK in text) == (history["degraded"] is None), history["degraded"]
    assert again.json()["firsttoken"]["turns_summarised"] > 0
