"""Choices, log probabilities, penalties and JSON over HTTP, through the engine's own process, with the real model."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from factories_gateway import RunningGateway, missing_models, running_gateway
from openai.types.chat import ChatCompletionMessageParam

pytestmark = pytest.mark.skipif(missing_models() is not None, reason=str(missing_models()))

MODEL = "default"
STORY = "Tell me a long story about a lighthouse keeper, her dog, and the ship that never came. " * 4
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": STORY}]
ADA: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Describe Ada, a woman of 36 years, as JSON."}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with running_gateway("[engine.cache]\nmemory_gib = 0.5\n") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client


def test_choices_with_a_seed_differ_and_come_back_the_same(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, seed=7, temperature=1.0, max_tokens=12
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 36
        assert answer.usage.prompt_tokens < 150  # of one prompt
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first
    assert (
        client.chat.completions.create(model=MODEL, messages=QUESTION, seed=8, temperature=1.0, max_tokens=12)
        .choices[0]
        .message.content
        == first[1]
    )


def test_greedy_choices_are_equal_and_stream_side_by_side(client: openai.OpenAI) -> None:
    texts, tokens = {0: "", 1: ""}, {0: "", 1: ""}
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=2, temperature=0, max_tokens=16, stream=True, logprobs=True, top_logprobs=2
    )
    for choice in (choice for chunk in stream for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        for token in (choice.logprobs.content or ()) if choice.logprobs is not None else ():
            assert token.logprob == token.top_logprobs[0].logprob <= 0.0
            tokens[choice.index] += token.token
    assert texts[0] == texts[1] != ""
    assert tokens == texts


def test_log_probabilities_spell_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say: naïve 你好 😀"}],
        temperature=0,
        max_tokens=24,
        logprobs=True,
        top_logprobs=5,
        stop=["\n"],
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content
    spelled = b"".join(bytes(token.bytes or ()) for token in told.content).decode("utf-8", "replace")
    content = answer.choices[0].message.content
    assert content
    assert spelled.startswith(content)
    assert all(len(token.top_logprobs) == 5 for token in told.content)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_follows_the_schema(client: openai.OpenAI, stream: bool) -> None:
    request: Any = {
        "model": MODEL,
        "messages": ADA,
        "temperature": 0.8,
        "seed": 1,
        "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}},
    }
    if stream:
        chunks = client.chat.completions.create(**request, stream=True)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    else:
        answer = client.chat.completions.create(**request)
        assert answer.model_extra is not None
        assert answer.model_extra["firsttoken"]["ignored_fields"] == []
        text = answer.choices[0].message.content or ""
    assert json.loads(text).keys() == {"name", "age"}


class Person(pydantic.BaseModel):
    """What the client's own parser wants."""

    name: str
    age: int
    nickname: str | None
    hobbies: list[str] = pydantic.Field(max_length=2)


def test_answer_is_parsed_by_the_clients_own_helper(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ADA, temperature=0, max_tokens=200, response_format=Person
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert len(person.hobbies) <= 2


def test_json_mode_gives_objects_where_the_model_comes_to_an_end(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Answer with a very short JSON object."}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, n=8, seed=1, max_tokens=120, response_format={"type": "json_object"}
    )
    texts = [choice.message.content or "" for choice in answer.choices]
    assert all(text.lstrip().startswith("{") for text in texts)
    ended = [text for text, choice in zip(texts, answer.choices, strict=True) if choice.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_schema_that_cannot_be_followed_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=ADA,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        )
    assert caught.value.param == "response_format.json_schema.schema"


def test_penalties_and_bias_change_the_answer(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Repeat the word apple a hundred times."}]

    def ask(**fields: Any) -> str:
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=40, **fields)
        assert answer.model_extra is not None
        assert answer.model_extra["firsttoken"]["ignored_fields"] == []
        return answer.choices[0].message.content or ""

    plain = ask()
    assert ask(frequency_penalty=2.0, presence_penalty=2.0) != plain
    words = ask(extra_body={"repetition_penalty": 50.0}).split()
    assert len(words) == len(set(words))
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary of 49152 ids"):
        ask(logit_bias={"49152": 1})
