"""Schemas become masks over any tokenizer, and what cannot be followed is refused with its reason."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories_tokenizer import (
    find_smollm2,
    write_byte_level_folder,
    write_gguf_tokenizer,
    write_sentencepiece_folder,
)

from engine.errors import GrammarError
from engine.grammar import ANY_OBJECT, MAX_SCHEMA_BYTES, GrammarCompiler, check_schema
from engine.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(params=["folder", "gguf", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "gguf":
        return Tokenizer.from_path(write_gguf_tokenizer(tmp_path / "t.gguf"))
    if request.param == "sentencepiece":
        return Tokenizer.from_path(write_sentencepiece_folder(tmp_path / "t"))
    return Tokenizer.from_path(write_byte_level_folder(tmp_path / "t"))


def random_walk(tokenizer: Tokenizer, schema: Any, seed: int, max_tokens: int = 2000) -> str | None:
    """Text of allowed tokens chosen at random, up to the end of the document; ``None`` if it does not come."""
    matcher = GrammarCompiler(tokenizer).compile(json.dumps(schema))
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    choice = random.Random(seed)
    output: list[int] = []
    for _ in range(max_tokens):
        matcher.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        ends = [token for token in allowed if token in tokenizer.eos_token_ids]
        if ends:
            return b"".join(tokenizer.token_bytes(token) for token in output).decode()
        token = choice.choice(allowed)
        output.append(token)
        matcher.accept([token])
    return None


@pytest.mark.parametrize("seed", range(5))
def test_any_walk_through_the_masks_is_a_document_that_follows_the_schema(tokenizer: Tokenizer, seed: int) -> None:
    text = random_walk(tokenizer, PERSON, seed)
    assert text is not None
    value = json.loads(text)
    assert {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 120
    assert set(value.get("tags", ())) <= {"a", "b"}


def test_control_tokens_are_never_allowed_inside(tokenizer: Tokenizer) -> None:
    matcher = GrammarCompiler(tokenizer).compile('{"type":"string"}')
    matcher.accept(tokenizer.encode('"')[-1:])
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits.sum() > 50
    assert not any(bits[token_id] for token_id in tokenizer.control_tokens.values())


def test_whitespace_ends_some_time(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write_byte_level_folder(tmp_path / "t"))
    compiler = GrammarCompiler(tokenizer)
    compiler.compile(ANY_OBJECT).accept(tokenizer.encode('{\n    "a": 1,\n    "b": [ 1, 2 ]\n}'))
    with pytest.raises(GrammarError, match="cannot be followed"):
        compiler.compile(ANY_OBJECT).accept(tokenizer.encode("{" + "\n" * 50))


def test_matchers_of_one_schema_are_independent(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write_byte_level_folder(tmp_path / "t"))
    compiler = GrammarCompiler(tokenizer)
    first, second = compiler.compile(ANY_OBJECT), compiler.compile(ANY_OBJECT)
    first.accept(tokenizer.encode('{"a"'))
    second.accept(tokenizer.encode("{}"))
    first.accept(tokenizer.encode(":"))
    assert (first.num_accepted, second.num_accepted) == (
        len(tokenizer.encode('{"a"')) + len(tokenizer.encode(":")),
        len(tokenizer.encode("{}")),
    )


@pytest.mark.parametrize(
    "schema", [PERSON, True, {}, {"type": "array", "minItems": 3}, {"$ref": "#/$defs/x", "$defs": {"x": {}}}]
)
def test_schemas_that_can_be_followed_are_accepted(schema: Any) -> None:
    check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        (False, "Unimplemented keys"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "https://example.org/schema"}, "not present"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"enum": ["x" * MAX_SCHEMA_BYTES]}, f"at most {MAX_SCHEMA_BYTES} are followed"),
    ],
)
def test_schema_that_cannot_be_followed_is_refused_with_the_reason(schema: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"JSON schema") as caught:
        check_schema(json.dumps(schema))
    assert message in str(caught.value)
    compiler = GrammarCompiler(Tokenizer.from_path(write_byte_level_folder(tmp_path / "t")))
    with pytest.raises(GrammarError):
        compiler.compile(json.dumps(schema))


@pytest.mark.parametrize("schema", ["", "{", "[" * 100_000])
def test_text_that_is_no_json_is_refused(schema: str) -> None:
    with pytest.raises(GrammarError, match=r"JSON schema"):
        check_schema(schema)


def test_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write_byte_level_folder(tmp_path / "t", config={}))
    assert not tokenizer.eos_token_ids
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        GrammarCompiler(tokenizer).compile(ANY_OBJECT)


@pytest.mark.skipif(find_smollm2() is None, reason="the default model has not been pulled")
def test_tokenizer_of_the_default_model_walks_too() -> None:
    path = find_smollm2()
    assert path is not None
    text = random_walk(Tokenizer.from_path(path), PERSON, 1)
    assert text is not None
    assert {"name", "age"} <= json.loads(text).keys()
