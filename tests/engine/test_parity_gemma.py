"""Gemma 3 270M against transformers in fp32, on prompts longer than its window of 512. Run with ``-m slow``."""

import gc
import os
import pydoc_data.topics
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from factories_model import generate, make_runner

from engine.model_catalogue import CATALOGUE
from engine.model_runner import ModelRunner
from engine.model_store import ModelStore
from engine.tokenizer import Tokenizer

LENGTH, NUM_TOKENS = 1100, 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ModelStore().path_of(CATALOGUE["gemma3-270m"]).is_file(),
        reason="Gemma 3 270M is not on this machine; `firsttoken models pull gemma3-270m` fetches it",
    ),
    pytest.mark.skipif("FIRSTTOKEN_SLOW" not in os.environ, reason="takes minutes and 4 GB; FIRSTTOKEN_SLOW=1 runs it"),
]


class Reference(NamedTuple):
    """What transformers computes for the prompt."""

    logits: torch.Tensor
    tokens: list[int]


@pytest.fixture(scope="module")
def model_path() -> Path:
    return ModelStore().path_of(CATALOGUE["gemma3-270m"])


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_path(model_path)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    assert tokenizer.bos_token_id is not None
    text = pydoc_data.topics.topics["class"] + pydoc_data.topics.topics["import"]
    return [tokenizer.bos_token_id, *tokenizer.encode(text)][:LENGTH]


@pytest.fixture(scope="module")
def reference(model_path: Path, prompt: list[int]) -> Reference:
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate installed")
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path.parent, gguf_file=model_path.name, dtype=torch.float32
        ).eval()
        logits = model(torch.tensor([prompt])).logits[0]
        output = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS
        )
        tokens = output[0, len(prompt) :].tolist()
    del model
    gc.collect()
    return Reference(logits, tokens)


@pytest.fixture(scope="module")
def runner(model_path: Path) -> ModelRunner:
    return make_runner(model_path, num_blocks=160)


def test_logits_agree_with_transformers_beyond_the_window(
    runner: ModelRunner, reference: Reference, prompt: list[int]
) -> None:
    assert (runner.logits(prompt) - reference.logits).abs().max() < 2e-3


@pytest.mark.parametrize("chunk_size", [None, 100, 512])
def test_greedy_tokens_agree_in_any_chunks(
    runner: ModelRunner, reference: Reference, prompt: list[int], chunk_size: int | None
) -> None:
    blocks = {"a": list(range(75, 0, -1))}
    assert generate(runner, {"a": prompt}, NUM_TOKENS, block_ids=blocks, chunk_size=chunk_size)["a"] == reference.tokens


def test_greedy_tokens_agree_behind_a_cached_prefix(
    runner: ModelRunner, reference: Reference, prompt: list[int]
) -> None:
    shared = list(range(100, 150))
    generate(runner, {"other": [*prompt[:800], 5, 6, 7]}, 2, block_ids={"other": [*shared, 90]})
    outputs = generate(runner, {"a": prompt}, NUM_TOKENS, block_ids={"a": [*shared, *range(25)]}, num_cached=800)
    assert outputs["a"] == reference.tokens


def test_ids_of_every_script_are_those_of_transformers(model_path: Path, tokenizer: Tokenizer) -> None:
    from factories_tokenizer import TEXTS
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)
    for text in TEXTS[:-1]:
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids, text
