"""The default model against transformers in fp32: logits of real prompts, greedy tokens, and what must not change them.

Greedy tokens stay equal under every chunk size, in a batch, and behind a cached prefix, because in fp32 the different
orders of summation move logits by about 1e-4, far less than the gap between the two best tokens.
"""

import gc
import pydoc_data.topics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from factories_model import default_model_path, generate, make_runner

from engine.model_runner import ModelRunner
from engine.tokenizer import Tokenizer

NUM_TOKENS = 64
LENGTHS = (10, 100, 1000, 4000)
MAX_BATCHED_BLOCKS = 16  # blocks of 16 for a short prompt and its output

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about autumn.",
    "Explain photosynthesis to a child.",
    "How many legs does a spider have?",
    "Translate 'good morning' into Spanish.",
    "Give me three tips for a job interview.",
    "What is 17 plus 25?",
    "Who wrote Romeo and Juliet?",
    "List the planets of the solar system.",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What does HTTP stand for?",
    "Describe the taste of a lemon.",
    "Name a famous painter and one of their works.",
    "How do I boil an egg?",
    "What is the difference between a virus and a bacterium?",
    "Tell me a short story about a lost dog.",
    "What causes the tides?",
    "Summarise the water cycle in two sentences.",
    "Is a tomato a fruit or a vegetable?",
)


class Reference(NamedTuple):
    """What transformers computes."""

    logits: dict[int, torch.Tensor]
    """Prompt length to logits after every token."""
    tokens: list[list[int]]
    """Greedy tokens of each question."""
    long_tokens: list[int]
    """Greedy tokens of the prompt of 1,000 tokens."""


@pytest.fixture(scope="module")
def model_path() -> Path:
    return default_model_path()


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_path(model_path)


@pytest.fixture(scope="module")
def long_text(tokenizer: Tokenizer) -> list[int]:
    """Real prose and code, the documentation that comes with Python: more tokens than any prompt here needs."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in ("class", "function", "import", "execmodel", "try"))
    token_ids = tokenizer.encode(text)
    assert len(token_ids) > 2 * max(LENGTHS)
    return token_ids


@pytest.fixture(scope="module")
def questions(tokenizer: Tokenizer) -> list[list[int]]:
    return [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", special=True)
        for question in QUESTIONS
    ]


def _greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of transformers for several prompts, padded on the left; the mask keeps the padding out of everything."""
    width = max(map(len, prompts))
    output = model.generate(
        torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        do_sample=False,
        min_new_tokens=NUM_TOKENS,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[list[int]] = output[:, width:].tolist()
    return tokens


@pytest.fixture(scope="module")
def reference(model_path: Path, long_text: list[int], questions: list[list[int]]) -> Iterator[Reference]:
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate installed")
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            model_path.parent, gguf_file=model_path.name, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = Reference(
            logits={length: model(torch.tensor([long_text[:length]])).logits[0] for length in LENGTHS},
            tokens=_greedy(model, questions),
            long_tokens=_greedy(model, [long_text[:1000]])[0],
        )
    del model
    gc.collect()
    yield values
    values.logits.clear()


@pytest.fixture(scope="module")
def runner(model_path: Path) -> ModelRunner:
    return make_runner(model_path, num_blocks=MAX_BATCHED_BLOCKS * len(QUESTIONS))


def _blocks(count: int) -> dict[str, list[int]]:
    """A block table for each of ``count`` questions, none of them in order."""
    return {str(index): list(range(index, MAX_BATCHED_BLOCKS * count, count))[::-1] for index in range(count)}


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_agree_with_transformers(
    runner: ModelRunner, reference: Reference, long_text: list[int], length: int
) -> None:
    actual = runner.logits(long_text[:length])
    assert actual.shape == reference.logits[length].shape
    assert (actual - reference.logits[length]).abs().max() < 1e-3


def test_greedy_tokens_agree_with_transformers(
    runner: ModelRunner, reference: Reference, questions: list[list[int]]
) -> None:
    prompts = {str(index): prompt for index, prompt in enumerate(questions)}
    outputs = generate(runner, prompts, NUM_TOKENS, block_ids=_blocks(len(prompts)))
    assert [outputs[str(index)] for index in range(len(questions))] == reference.tokens


def test_greedy_tokens_do_not_change_in_a_batch_of_eight(
    runner: ModelRunner, reference: Reference, questions: list[list[int]]
) -> None:
    prompts = {str(index): questions[index] for index in range(8)}
    outputs = generate(runner, prompts, NUM_TOKENS, block_ids=_blocks(8), chunk_size=16)
    assert [outputs[str(index)] for index in range(8)] == reference.tokens[:8]


def test_greedy_tokens_of_one_sequence_alone_agree(
    runner: ModelRunner, reference: Reference, questions: list[list[int]]
) -> None:
    outputs = generate(runner, {"0": questions[10]}, NUM_TOKENS, block_ids=_blocks(1))
    assert outputs["0"] == reference.tokens[10]


@pytest.mark.parametrize("chunk_size", [16, 64, 100, 512, None])
def test_greedy_tokens_do_not_change_with_the_chunk_size(
    runner: ModelRunner, reference: Reference, long_text: list[int], chunk_size: int | None
) -> None:
    blocks = {"long": list(range(70, 0, -1))}
    outputs = generate(runner, {"long": long_text[:1000]}, NUM_TOKENS, block_ids=blocks, chunk_size=chunk_size)
    assert outputs["long"] == reference.long_tokens


@pytest.mark.parametrize("num_cached", [16, 512, 992])
def test_greedy_tokens_do_not_change_behind_a_cached_prefix(
    runner: ModelRunner, reference: Reference, long_text: list[int], num_cached: int
) -> None:
    shared = list(range(200, 200 + num_cached // 16))
    other = long_text[:num_cached] + long_text[5000:5020]
    generate(runner, {"other": other}, 2, block_ids={"other": [*shared, 300, 301]})
    own = list(range(100, 170 - len(shared)))
    outputs = generate(
        runner, {"long": long_text[:1000]}, NUM_TOKENS, block_ids={"long": [*shared, *own]}, num_cached=num_cached
    )
    assert outputs["long"] == reference.long_tokens
