"""Gemma's vocabulary, built without transformers, is the one that transformers builds."""

import json
from pathlib import Path
from typing import Any

import pytest
from factories_tokenizer import TEXTS, write_gemma_gguf

from engine.tokenizer import Tokenizer
from engine.tokenizer_source import _backend_from_transformers, load_tokenizer_source


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_gguf(tmp_path_factory.mktemp("gemma") / "gemma.gguf")


def test_vocabulary_merges_and_added_tokens_are_those_of_transformers(path: Path) -> None:
    theirs: dict[str, Any] = json.loads(_backend_from_transformers(path.parent, path.name).to_str())
    ours: dict[str, Any] = json.loads(load_tokenizer_source(path).backend.to_str())
    assert ours["model"]["merges"] == theirs["model"]["merges"]
    assert len(ours["model"]["merges"]) > 10
    for name in ours.keys() - {"post_processor"}:
        assert ours[name] == theirs[name], name


def test_ids_of_every_script_are_those_of_transformers(path: Path) -> None:
    theirs, ours = _backend_from_transformers(path.parent, path.name), Tokenizer.from_path(path)
    for text in (*TEXTS, "the  quick\n\n\n thing   ing", "    "):
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False).ids, text


def test_text_survives_and_prompts_start_with_bos(path: Path) -> None:
    tokenizer = Tokenizer.from_path(path)
    for text in ("the quick thing", " the  quick\n\n", "naïve 你好 😀"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.add_bos_token) == (2, True)
    assert tokenizer.eos_token_ids == {1}
    assert tokenizer.encode("<end_of_turn>") != tokenizer.encode("<end_of_turn>", special=True)
