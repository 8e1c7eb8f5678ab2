"""The proof at start that tenants are apart, and the token ids of public prefixes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from factories_engine import FakeModelRunner, make_engine
from factories_tokenizer import make_chat_tokenizer, write_byte_level_folder

from engine.block_hash import CacheKey
from engine.errors import EngineError
from engine.isolation import encode_public_prefixes, verify_isolation


class ByteChat:
    """A template that writes the system message first."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [byte for message in messages for byte in f"<{message['content']}>".encode()]


def test_isolated_engine_passes() -> None:
    verify_isolation(make_engine())
    verify_isolation(make_engine(enable_prefix_caching=False), expects_hits=False)


def test_engine_that_mixes_tenants_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheKey, "extra", lambda self, salt: b"the same for all")
    with pytest.raises(EngineError, match="not isolated: 0 and 8 tokens of others were found"):
        verify_isolation(make_engine())


def test_engine_whose_cache_finds_nothing_does_not_start() -> None:
    with pytest.raises(EngineError, match="found 0 tokens of the same tenant, not 8"):
        verify_isolation(make_engine(enable_prefix_caching=False))


def test_model_that_fails_the_test_prompt_does_not_start() -> None:
    runner = FakeModelRunner(64, 4)
    runner.failing_request_ids = {"isolation-0"}
    with pytest.raises(EngineError, match="self-test of the prefix cache failed: the fake sequence"):
        verify_isolation(make_engine(runner))


def test_engine_too_small_for_a_prefix_is_not_tested() -> None:
    verify_isolation(make_engine(num_blocks=2), expects_hits=True)


def test_public_prefix_ends_where_the_question_begins() -> None:
    assert encode_public_prefixes(ByteChat(), ["Be brief."]) == [list(b"<Be brief.><")]


def test_public_prefix_is_how_every_prompt_with_it_begins(tmp_path: Path) -> None:
    chat = make_chat_tokenizer(write_byte_level_folder(tmp_path))
    text = "You answer questions about the handbook of the company."
    (prefix,) = encode_public_prefixes(chat, [text])
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "How many days off?"}]
    assert chat.encode_chat(messages)[: len(prefix)] == prefix
    assert len(prefix) > chat.count_text(text) // 2
