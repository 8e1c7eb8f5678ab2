"""The engine over a real forward pass: penalties, bias, min_tokens, log probabilities, JSON, from request to output."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from factories_engine import make_engine, run_to_end
from factories_sampling import load_engine, write_tiny_model
from factories_tokenizer import find_smollm2

from engine.chat_template import ChatTokenizer
from engine.errors import GrammarError
from engine.llm_engine import LLMEngine
from engine.outputs import GenerateRequest, RequestOutput
from engine.sampling_params import SamplingParams
from engine.wire import OutputBatch, core_message_decoder, encoder

PROMPT = list(range(20, 45))
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 200}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    """Its model has nine logits more than tokens."""
    return load_engine(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_spare_logits=9))


def ask(
    engine: LLMEngine, sampling: SamplingParams, prompt: Sequence[int] = PROMPT, name: str = "r"
) -> list[RequestOutput]:
    engine.add_request(
        GenerateRequest(request_id=name, prompt_token_ids=list(prompt), sampling=sampling, cache_salt="acme")
    )
    outputs: list[RequestOutput] = run_to_end(engine)[name]
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def text_of(outputs: Sequence[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def test_bias_chooses_and_forbids_tokens(engine: LLMEngine) -> None:
    greedy = tokens_of(ask(engine, SamplingParams(temperature=0.0, max_tokens=1)))[0]
    chosen = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logit_bias={77: 100.0})
    assert tokens_of(ask(engine, chosen)) == [77] * 5
    forbidden = SamplingParams(temperature=0.0, max_tokens=1, logit_bias={greedy: -100.0})
    assert tokens_of(ask(engine, forbidden))[0] != greedy


def test_strong_penalty_lets_no_token_come_twice(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={77: 30.0})
    assert len(set(tokens_of(ask(engine, params)))) == 1
    for penalty in ({"repetition_penalty": 1000.0}, {"frequency_penalty": 2.0, "presence_penalty": 2.0}):
        changed = msgspec.structs.replace(params, **penalty)
        assert len(set(tokens_of(ask(engine, changed)))) > 10


def test_penalties_do_not_depend_on_batch_and_preemption(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    prompts = [PROMPT[: 10 + index] for index in range(6)]
    params = SamplingParams(
        temperature=0.0, max_tokens=60, ignore_eos=True, frequency_penalty=0.7, repetition_penalty=1.3
    )
    expected = [tokens_of(ask(load_engine(folder), params, prompt)) for prompt in prompts]
    crowded = load_engine(folder, num_blocks=24)
    for index, prompt in enumerate(prompts):
        crowded.add_request(make_request_of(f"r{index}", prompt, params))
    outputs = run_to_end(crowded)
    assert crowded.stats().num_preemptions > 0
    assert [tokens_of(outputs[f"r{index}"]) for index in range(6)] == expected


def make_request_of(name: str, prompt: Sequence[int], sampling: SamplingParams) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=list(prompt), sampling=sampling, cache_salt="acme")


def test_min_tokens_holds_back_ends(engine: LLMEngine) -> None:
    (eos,) = engine.tokenizer.eos_token_ids
    params = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={eos: 100.0})
    assert len(tokens_of(ask(engine, params))) == 1
    outputs = ask(engine, msgspec.structs.replace(params, min_tokens=7))
    assert len(tokens_of(outputs)) == 8
    assert outputs[-1].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_model_and_cross_the_wire(engine: LLMEngine) -> None:
    params = SamplingParams(
        temperature=0.7, seed=3, max_tokens=6, ignore_eos=True, top_logprobs=4, presence_penalty=1.0
    )
    outputs = ask(engine, params)
    batch = core_message_decoder.decode(encoder.encode(OutputBatch(outputs=outputs)))
    assert isinstance(batch, OutputBatch)
    told = [position for output in batch.outputs for position in output.logprobs or ()]
    tokens = tokens_of(outputs)
    logits = engine.runner.logits([*PROMPT, *tokens])  # type: ignore[attr-defined]
    expected = logits[len(PROMPT) - 1 : -1].log_softmax(dim=-1)
    assert [position.chosen.token_id for position in told] == tokens
    for row, position in enumerate(told):
        assert position.chosen.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-4)
        best = expected[row].topk(4)
        assert [top.token_id for top in position.top] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([top.logprob for top in position.top]), best.values, atol=1e-4, rtol=0)
        assert position.chosen.text == engine.tokenizer.token_bytes(tokens[row], skip_special=False)


def test_log_probabilities_add_up_to_the_text_without_what_ended_it(engine: LLMEngine) -> None:
    whole = text_of(ask(engine, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)))
    stop = whole[10:13]
    outputs = ask(engine, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=(stop,), top_logprobs=0))
    assert outputs[-1].stop_reason == stop
    told = b"".join(p.chosen.text for output in outputs for p in output.logprobs or ()).decode("utf-8", "replace")
    assert told.startswith(text_of(outputs))  # the last token may reach into the stop string
    assert len(told) - len(text_of(outputs)) < 12
    for output in outputs[:-1]:
        assert output.logprobs is not None
    (eos,) = engine.tokenizer.eos_token_ids
    ended = ask(engine, SamplingParams(temperature=0.0, max_tokens=5, logit_bias={eos: 100.0}, top_logprobs=1))
    assert [output.logprobs for output in ended] == [[]]


def test_outputs_without_the_wish_tell_nothing(engine: LLMEngine) -> None:
    assert all(output.logprobs is None for output in ask(engine, SamplingParams(max_tokens=3)))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_output_follows_the_schema_however_random_the_model_is(engine: LLMEngine, seed: int) -> None:
    outputs = ask(engine, SamplingParams(seed=seed, max_tokens=400, json_schema=PERSON))
    assert outputs[-1].finish_reason == "stop"
    value = json.loads(text_of(outputs))
    assert value.keys() == {"name", "age"}
    assert isinstance(value["age"], int)


def test_schemas_and_free_text_share_a_batch(engine: LLMEngine) -> None:
    for index in range(4):
        schema = PERSON if index % 2 else None
        params = SamplingParams(seed=index, max_tokens=300 if schema else 20, json_schema=schema)
        engine.add_request(make_request_of(f"r{index}", PROMPT, params))
    outputs = run_to_end(engine)
    for index in (1, 3):
        assert json.loads(text_of(outputs[f"r{index}"])).keys() == {"name", "age"}


def test_choices_of_one_prompt_share_its_blocks(tmp_path: Path) -> None:
    engine = load_engine(write_tiny_model(tmp_path / "tiny"))
    for choice in range(4):
        params = SamplingParams(seed=choice, max_tokens=5, ignore_eos=True)
        engine.add_request(make_request_of(f"r{choice}", PROMPT, params))
    outputs = run_to_end(engine)
    num_cached = [outputs[f"r{choice}"][0].num_cached_tokens for choice in range(4)]
    assert num_cached == [0, *[(len(PROMPT) - 1) // 8 * 8] * 3]
    assert len({tuple(tokens_of(outputs[f"r{choice}"])) for choice in range(4)}) == 4


def test_schema_that_cannot_be_followed_is_refused_on_arrival(engine: LLMEngine) -> None:
    with pytest.raises(GrammarError, match="Invalid type: foo"):
        ask(engine, SamplingParams(json_schema='{"type":"foo"}'))
    assert not engine.has_unfinished


def test_engine_without_grammars_refuses_a_schema() -> None:
    with pytest.raises(GrammarError, match="no grammars"):
        make_engine().add_request(make_request_of("r", PROMPT, SamplingParams(json_schema='{"type":"object"}')))


@pytest.mark.skipif(find_smollm2() is None, reason="the default model has not been pulled")
def test_default_model_writes_json() -> None:
    path = find_smollm2()
    assert path is not None
    chat = ChatTokenizer.from_path(path)
    prompt = chat.encode_chat([{"role": "user", "content": "Describe a person named Ada, 36 years old, as JSON."}])
    outputs = ask(
        load_engine(path, num_blocks=64, block_size=16),
        SamplingParams(temperature=0.0, max_tokens=64, json_schema=PERSON),
        prompt,
    )
    assert "Ada" in json.loads(text_of(outputs))["name"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": -1}, "min_tokens must not be negative, got -1"),
        ({"min_p": 1.1}, "min_p must be between 0 and 1, got 1.1"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2, got 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2, got -3"),
        ({"repetition_penalty": 0}, "repetition_penalty must be positive, got 0"),
        ({"logit_bias": {-1: 1.0}}, "token ids of at least 0, got -1"),
        ({"logit_bias": {1: 101.0}}, "between -100 and 100, got 101.0 for token 1"),
        ({"top_logprobs": 21}, "top_logprobs must be between 0 and 20, got 21"),
        ({"json_schema": "{}", "ignore_eos": True}, "ignore_eos cannot be combined with response_format"),
        ({"json_schema": "{}", "min_tokens": 1}, "min_tokens cannot be combined with response_format"),
    ],
)
def test_parameters_out_of_range_are_refused_with_value_and_limit(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.convert(fields, SamplingParams)
