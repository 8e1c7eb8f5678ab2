"""The fast encoder gives the ids of the ``tokenizers`` library on every text, or is not there, or leaves the text."""

import itertools
import json
import pydoc_data.topics
import threading
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from factories_tokenizer import (
    TEXTS,
    find_smollm2,
    write_byte_level_folder,
    write_gguf_tokenizer,
    write_sentencepiece_folder,
    write_unigram_folder,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from engine.fast_encoder import PROBES, build_fast_encoder
from engine.tokenizer import Tokenizer

ALL_TEXTS = (
    *TEXTS,
    *PROBES,
    "",
    "ᚠᛇᚻ ᠮᠣᠩᠭᠣᠯ ꦗꦮ ᏣᎳᎩ ⵜⵉⴼⵉⵏⴰⵖ ሰላም ລາວ བོད་ မြန်မာ සිංහල ಕನ್ನಡ മലയാളം ગુજરાતી ਪੰਜਾਬੀ ଓଡ଼ିଆ ܣܘܪܝܝܐ ދިވެހި ߒߞߏ ꯃꯩꯇꯩ",
    "𓀀 𒀀 𐤀 𐎀 🀄 𝟙𝟚 ٣ ৩ ൩ ๓ 〇一二 ㊿ ⑳",
    "a\u200eb\u202ec\u2066d\u00ade\u034ff\U000e0001g\ufe0f",
)


@pytest.fixture(scope="module", params=["gpt-2", "llama-bpe", "qwen2", "tekken", "folder", "smollm2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "smollm2":
        path = find_smollm2()
        if path is None:
            pytest.skip("the default model has not been pulled")
    elif request.param == "folder":
        path = write_byte_level_folder(folder / "t")
    else:
        path = write_gguf_tokenizer(folder / "t.gguf", pre=request.param)
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer.wait_for_fast_encoder()
    return tokenizer


def slow_ids(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Of the ``tokenizers`` library, with the same treatment of control tokens."""
    backend = tokenizer._backend if special else tokenizer._text_backend
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("special", [False, True])
def test_ids_of_every_script_are_those_of_tokenizers(tokenizer: Tokenizer, special: bool) -> None:
    for text in ALL_TEXTS:
        assert tokenizer.encode(text, special=special) == slow_ids(tokenizer, text, special=special), text


def test_ids_of_every_character_are_those_of_tokenizers(tokenizer: Tokenizer) -> None:
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    # all that is assigned below the ideographs, and a sample of what repeats itself above
    chosen = [c for c in characters if ord(c) < 0x3100 or (ord(c) % 61 == 0 and unicodedata.category(c) != "Co")]
    for block in itertools.batched(chosen, 64) if hasattr(itertools, "batched") else _batched(chosen, 64):
        text = "".join(f"a{c}a {c} 1{c}1 {c}{c} !{c}\n{c}'{c}" for c in block)
        assert tokenizer.encode(text) == slow_ids(tokenizer, text, special=False), f"from {ord(block[0]):x}"


def _batched(items: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.text(max_size=12)
        | st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "<think>", "<|im_", "  ", "\n\n", "'ll", " 12", "\r\n", "日本"]
        )
    )
)
def test_any_text_has_the_ids_of_tokenizers(parts: list[str]) -> None:
    tokenizer = _shared()
    text = "".join(parts)
    for special in (False, True):
        assert tokenizer.encode(text, special=special) == slow_ids(tokenizer, text, special=special)


_SHARED: list[Tokenizer] = []


def _shared() -> Tokenizer:
    """One for all examples."""
    if not _SHARED:
        path = find_smollm2()
        if path is None:
            pytest.skip("the default model has not been pulled")
        _SHARED.append(Tokenizer.from_path(path))
        assert _SHARED[0].wait_for_fast_encoder()
    return _SHARED[0]


def test_long_prose_and_code_have_the_ids_of_tokenizers(tokenizer: Tokenizer) -> None:
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in ("class", "import", "operator-summary"))
    assert tokenizer.encode(text) == slow_ids(tokenizer, text, special=False)


@pytest.mark.parametrize("text", [" " * 60_000, "\n" * 60_000, "x" + "\u3000\t" * 30_000 + "y", "a" * 60_000])
def test_endless_runs_are_encoded_all_the_same(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == slow_ids(tokenizer, text, special=False)


def test_run_that_would_overflow_the_regular_expressions_is_left_to_tokenizers(tokenizer: Tokenizer) -> None:
    encoder = build_fast_encoder(tokenizer._backend)
    assert encoder is not None
    assert encoder.encode(" " * 3_000_000, set()) is None


def test_lone_surrogate_is_left_to_tokenizers(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud800b \ud83d\ude00") == tokenizer.encode("a\ufffdb \ufffd\ufffd")


def test_texts_before_the_encoder_is_built_have_the_same_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write_gguf_tokenizer(tmp_path / "t.gguf"))
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.extend(tokenizer.encode(text) for text in TEXTS)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokenizer.wait_for_fast_encoder()
    expected = [slow_ids(tokenizer, text, special=False) for text in TEXTS]
    assert sorted(found) == sorted(expected * 4)


def make_backend(**changes: Any) -> BackendTokenizer:
    """Byte-level BPE of all bytes and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = changes.get("merges", [("a", "b"), ("ab", "c"), ("1", "2"), ("Ġ", "a")])
    vocab = {token: index for index, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    vocab |= changes.get("more", {})
    backend = BackendTokenizer(models.BPE(vocab, merges, ignore_merges=changes.get("ignore_merges", False)))
    backend.pre_tokenizer = changes.get("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))
    if "normalizer" in changes:
        backend.normalizer = changes["normalizer"]
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(changes.get("added", []))
    return backend


def test_simple_vocabulary_has_a_fast_encoder() -> None:
    encoder = build_fast_encoder(make_backend())
    assert encoder is not None
    assert encoder.encode("abc 12", set()) == make_backend().encode("abc 12").ids


def test_single_digits_are_cut_out_as_tokenizers_does() -> None:
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend = make_backend(pre_tokenizer=pre_tokenizers.Sequence(steps))
    encoder = build_fast_encoder(backend)
    assert encoder is not None
    for text in (*ALL_TEXTS, "a  12   3\n4 x  5", "  ½  Ⅷ1"):
        assert encoder.encode(text, set()) in (None, backend.encode(text).ids), text


def test_text_that_composition_would_change_is_left_to_tokenizers() -> None:
    backend = make_backend(normalizer=normalizers.NFC())
    encoder = build_fast_encoder(backend)
    assert encoder is not None
    assert encoder.encode("caf\u00e9", set()) == backend.encode("caf\u00e9").ids
    assert encoder.encode("cafe\u0301", set()) is None


def test_byte_without_a_token_is_left_to_tokenizers() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(token for token in alphabet if token != "ć")}  # byte 7
    backend = BackendTokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder = build_fast_encoder(backend)
    assert encoder is not None
    missing = next(byte for byte in range(256) if not backend.encode(chr(byte)).ids)
    assert encoder.encode(f"a{chr(missing)}b", set()) is None
    assert encoder.encode("ab", set()) == backend.encode("ab").ids


@pytest.mark.parametrize(
    "changes",
    [
        {"merges": [("a", "b"), ("1", "2")], "more": {"ab": 300}},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"normalizer": normalizers.Lowercase()},
        {"added": [AddedToken("<x>", lstrip=True)]},
        {"added": [AddedToken("<x>"), AddedToken("<x>y")]},
        {"ignore_merges": True, "more": {"zz": 300}},
        # "abc" is joined as a + bc, which no merge makes whole, but it would be looked up whole
        {"merges": [("b", "c"), ("a", "b"), ("ab", "c")]},
    ],
    ids=["order", "prefix space", "words", "lower case", "strip", "prefix", "whole only", "unreachable"],
)
def test_vocabulary_that_tiktoken_would_read_differently_has_no_fast_encoder(changes: dict[str, Any]) -> None:
    assert build_fast_encoder(make_backend(**changes)) is None


def test_other_kinds_of_vocabulary_have_no_fast_encoder(tmp_path: Path) -> None:
    for path in (write_sentencepiece_folder(tmp_path / "s"), write_unigram_folder(tmp_path / "u")):
        tokenizer = Tokenizer.from_path(path)
        assert not tokenizer.wait_for_fast_encoder()
        assert tokenizer.encode("the fox") == slow_ids(tokenizer, "the fox", special=False)


def test_folder_with_token_that_no_merge_makes_keeps_its_ids(tmp_path: Path) -> None:
    folder = write_byte_level_folder(tmp_path / "t")
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["vocab"]["zqzq"] = max(spec["model"]["vocab"].values()) + 500
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.wait_for_fast_encoder()
    assert tokenizer.encode("zqzq") == slow_ids(tokenizer, "zqzq", special=False)
