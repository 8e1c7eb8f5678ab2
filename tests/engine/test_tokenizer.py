"""Tokenizer: ids equal transformers', look-alikes stay text, bytes add up, bad files are named."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from factories_tokenizer import (
    CONTROL_TOKENS,
    TEXTS,
    find_smollm2,
    write_byte_level_folder,
    write_gguf_tokenizer,
    write_sentencepiece_folder,
    write_unigram_folder,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.tokenizer import Tokenizer

SMOLLM2 = find_smollm2()
needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="smollm2-135m-instruct has not been pulled")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_path(write_gguf_tokenizer(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    assert SMOLLM2 is not None
    return Tokenizer.from_path(SMOLLM2)


def oracle(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


@pytest.mark.filterwarnings("ignore")
@needs_smollm2
def test_smollm2_ids_equal_those_of_transformers(smollm2: Tokenizer) -> None:
    assert SMOLLM2 is not None
    reference = oracle(SMOLLM2)
    joined = ("\n\n".join(TEXTS), " ".join(reversed(TEXTS)))
    for text in (*TEXTS, *joined):
        assert smollm2.encode(text, special=True) == reference.encode(text, add_special_tokens=False)
    reference.backend_tokenizer.encode_special_tokens = True
    for text in (*TEXTS, *joined):
        assert smollm2.encode(text) == reference.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert smollm2.eos_token_ids == {reference.eos_token_id}
    assert smollm2.vocab_size == len(reference)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_every_split_gives_the_ids_of_transformers(pre: str, tmp_path: Path) -> None:
    path = write_gguf_tokenizer(tmp_path / "model.gguf", pre=pre)
    tokenizer, reference = Tokenizer.from_path(path), oracle(path)
    for text in TEXTS:
        assert tokenizer.encode(text, special=True) == reference.encode(text, add_special_tokens=False)


@pytest.mark.filterwarnings("ignore")
def test_unknown_split_is_left_to_transformers(tmp_path: Path) -> None:
    path = write_gguf_tokenizer(tmp_path / "model.gguf", pre="gpt-4o")
    tokenizer, reference = Tokenizer.from_path(path), oracle(path)
    for text in TEXTS:
        assert tokenizer.encode(text, special=True) == reference.encode(text, add_special_tokens=False)


@needs_smollm2
def test_smollm2_loads_in_seconds() -> None:
    assert SMOLLM2 is not None
    start = time.process_time()
    Tokenizer.from_path(SMOLLM2).encode("warm")
    assert time.process_time() - start < 30


@needs_smollm2
def test_loading_and_encoding_import_no_torch() -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
from engine.chat_template import ChatTokenizer
chat = ChatTokenizer.from_path(Path({str(SMOLLM2)!r}))
assert chat.count_prompt([{{"role": "user", "content": "hi"}}]) > 10
assert chat.tokenizer.decode(chat.tokenizer.encode("hi")) == "hi"
assert "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_decode_undoes_encode(text: str) -> None:
    tokenizer = _hypothesis_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


_SHARED: list[Tokenizer] = []


def _hypothesis_tokenizer() -> Tokenizer:
    if not _SHARED:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _SHARED.append(Tokenizer.from_path(write_gguf_tokenizer(Path(folder) / "tiny.gguf")))
    return _SHARED[0]


def test_control_tokens_are_ids_only_where_asked(tiny: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert tiny.encode(text, special=True).count(2) == 1
    assert not set(tiny.encode(text)) & {0, 1, 2}
    assert tiny.decode(tiny.encode(text)) == text


def test_tags_of_the_models_answers_are_one_token_in_any_text(tiny: Tokenizer) -> None:
    assert tiny.encode("<think>") == tiny.encode("<think>", special=True) == [3]
    assert "<think>" not in tiny.control_tokens
    assert tiny.decode([3]) == "<think>"


def test_unmarked_turn_markers_are_control_tokens(tmp_path: Path) -> None:
    path = write_gguf_tokenizer(
        tmp_path / "model.gguf", control_tokens=("<|endoftext|>",), user_defined_tokens=("<|im_start|>", "<|im_end|>")
    )
    tokenizer = Tokenizer.from_path(path)
    assert set(tokenizer.control_tokens) == set(CONTROL_TOKENS)
    assert not set(tokenizer.encode("<|im_start|>")) & {0, 1, 2}


def test_decode_skips_control_tokens_unless_asked(tiny: Tokenizer) -> None:
    ids = tiny.encode("hi<|im_end|>", special=True)
    assert tiny.decode(ids) == "hi"
    assert tiny.decode(ids, skip_special=False) == "hi<|im_end|>"


def test_ids_outside_the_vocabulary_decode_to_nothing(tiny: Tokenizer) -> None:
    assert tiny.decode([tiny.vocab_size, 10**9, -1]) == ""


def test_bytes_that_form_no_character_decode_to_the_replacement_character(tiny: Tokenizer) -> None:
    ids = tiny.encode("好")
    table = [tiny.token_bytes(token_id) for token_id in ids]
    assert b"".join(table) == "好".encode()
    first_byte = next(i for i in range(tiny.vocab_size) if tiny.token_bytes(i) == "好".encode()[:1])
    assert tiny.decode([first_byte]) == "\N{REPLACEMENT CHARACTER}"


def test_lone_surrogate_is_encoded_as_the_replacement_character(tiny: Tokenizer) -> None:
    assert tiny.encode("a\ud800b") == tiny.encode("a\N{REPLACEMENT CHARACTER}b")
    assert tiny.encode("a\ud800b", special=True) == tiny.encode("a\N{REPLACEMENT CHARACTER}b")


def test_max_token_bytes_bounds_every_token(tiny: Tokenizer) -> None:
    assert tiny.max_token_bytes == max(len(tiny.token_bytes(i, skip_special=False)) for i in range(tiny.vocab_size))


def test_digest_depends_on_what_determines_the_ids_only(tmp_path: Path) -> None:
    def digest(name: str, **options: Any) -> str:
        return Tokenizer.from_path(write_gguf_tokenizer(tmp_path / name, **options)).digest

    assert digest("a.gguf") == digest("b.gguf", template="{{ messages }}")
    different = {
        digest("c.gguf"),
        digest("d.gguf", pre="qwen2"),
        digest("e.gguf", user_defined_tokens=("<think>", "</thinks>")),
        digest("f.gguf", bos="<|im_start|>", add_bos=True),
    }
    assert len(different) == 4


def test_encoding_is_the_same_from_many_threads(tiny: Tokenizer) -> None:
    text = TEXTS[-1] + TEXTS[0]
    expected = {True: tiny.encode(text, special=True), False: tiny.encode(text)}
    results: list[bool] = []

    def work(special: bool) -> None:
        same = all(tiny.encode(text, special=special) == expected[special] for _ in range(200))
        results.append(same)

    threads = [threading.Thread(target=work, args=(index % 2 == 0,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8
    assert expected[True] != expected[False]


def test_eos_ids_are_the_declared_ones_and_those_the_template_ends_turns_with(tmp_path: Path) -> None:
    plain = write_gguf_tokenizer(tmp_path / "a.gguf", eos="<|endoftext|>")
    assert Tokenizer.from_path(plain).eos_token_ids == {0}
    template = "{{ messages[0]['content'] + '<|im_end|>' }}"
    chat = write_gguf_tokenizer(tmp_path / "b.gguf", eos="<|endoftext|>", template=template)
    assert Tokenizer.from_path(chat).eos_token_ids == {0, 2}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"bos": "<|endoftext|>"}, False),
        ({"bos": "<|endoftext|>", "add_bos": True}, True),
        ({"bos": "<|endoftext|>", "pre": "llama-bpe"}, True),
        ({"bos": "<|endoftext|>", "pre": "llama-bpe", "add_bos": False}, False),
        ({"add_bos": True}, False),
    ],
)
def test_bos_is_added_where_the_gguf_file_says_so(options: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    assert Tokenizer.from_path(write_gguf_tokenizer(tmp_path / "a.gguf", **options)).add_bos_token is expected


def test_folder_reads_tokenizer_json_and_generation_config(tmp_path: Path) -> None:
    folder = write_byte_level_folder(tmp_path / "m", generation_config={"eos_token_id": [700, 702]})
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.eos_token_ids == {700, 702}
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>", special=True) == [702]
    assert not set(tokenizer.encode("<|im_end|>")) & {700, 701, 702}


def test_template_may_stand_in_tokenizer_config(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    for value, expected in (("x", "x"), (named, "a")):
        folder = write_byte_level_folder(tmp_path / expected, config={"chat_template": value})
        assert Tokenizer.from_path(folder).chat_template == expected


def test_sentencepiece_folder_round_trips_with_byte_fallback(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write_sentencepiece_folder(tmp_path / "m"))
    for text in ("the fox", "héllo 好 😀", "  two  spaces ", "a</s>b"):
        ids = tokenizer.encode(text)
        assert not set(ids) & {1, 2}
        assert tokenizer.decode(ids) == text
    assert tokenizer.add_bos_token
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2}


def test_add_bos_token_of_the_config_wins_over_the_post_processor(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    assert not Tokenizer.from_path(write_sentencepiece_folder(tmp_path / "m", config=config)).add_bos_token


def test_control_tokens_are_not_found_as_pieces_of_a_unigram_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write_unigram_folder(tmp_path / "m"))
    assert 1 in tokenizer.encode("a</s>b", special=True)
    ids = tokenizer.encode("a</s>b")
    assert 1 not in ids
    assert tokenizer.decode(ids).replace(" ", "") == "a</s>b"


def test_folder_with_one_gguf_file_is_that_file(tmp_path: Path, tiny: Tokenizer) -> None:
    write_gguf_tokenizer(tmp_path / "tiny.gguf")
    assert Tokenizer.from_path(tmp_path).digest == tiny.digest
    write_gguf_tokenizer(tmp_path / "second.gguf")
    with pytest.raises(ModelError, match=r"second\.gguf, tiny\.gguf"):
        Tokenizer.from_path(tmp_path)


def test_split_at_control_tokens_covers_the_text(tiny: Tokenizer) -> None:
    text = "<|im_start|>user\n好 <think>😀<|im_end|>\nrest"
    assert list(tiny.split_at_control_tokens(text)) == [
        ("<|im_start|>", 1),
        ("user\n好 <think>😀", None),
        ("<|im_end|>", 2),
        ("\nrest", None),
    ]


def _broken_files(folder: Path) -> dict[str, Path]:
    whole = write_gguf_tokenizer(folder / "whole.gguf").read_bytes()
    contents = {
        "empty": b"",
        "text": b"hello, this is no model at all",
        "cut": whole[: len(whole) // 2],
        "cut_early": whole[:30],
        "version": whole[:4] + b"\x63" + whole[5:],
        "huge_string": whole[:24] + b"\xff" * 8 + whole[32:],
    }
    files = {}
    for name, data in contents.items():
        files[name] = folder / f"{name}.gguf"
        files[name].write_bytes(data)
    return files


@pytest.mark.parametrize("name", ["empty", "text", "cut", "cut_early", "version", "huge_string"])
def test_broken_gguf_file_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    path = _broken_files(tmp_path)[name]
    with pytest.raises(ModelError, match=rf"{name}\.gguf"):
        Tokenizer.from_path(path)


def test_missing_and_foreign_paths_are_errors_that_name_them(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        Tokenizer.from_path(tmp_path / "nowhere")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"weights\.bin"):
        Tokenizer.from_path(tmp_path / "weights.bin")


def test_broken_json_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    folder = write_byte_level_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_path(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_path(folder)
