"""Request bodies: what is accepted, and errors that name the field."""

import contextlib
import sys
from typing import Any

import msgspec
import pytest
from factories_app import make_body, user
from hypothesis import given
from hypothesis import strategies as st

from app.completion_request import CompletionRequest, read_completion
from app.errors import InvalidRequestError
from app.schemas import CompletionBody
from engine import grammar


def read(**fields: Any) -> CompletionRequest:
    return read_completion(msgspec.json.encode(make_body(**fields)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b"not json", "not valid JSON"),
        (b'{"a":', "not valid JSON"),
        (b'{"a":"\xff"}', "not valid JSON"),
        (b'{"a":NaN}', "not valid JSON"),
        (b"[]", "must be a JSON object, got array"),
        (b"null", "must be a JSON object, got null"),
        (b'"text"', "must be a JSON object, got string"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_completion(body)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": None}, "messages", "Expected `array`, got `null`"),
        ({"messages": "hi"}, "messages", "Expected `array`, got `str`"),
        ({"messages": ["hi"]}, "messages[0]", "Expected `object`, got `str`"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "required field is missing"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", "must be one of developer, system"),
        ({"messages": [{"role": 3, "content": "hi"}]}, "messages[0].role", "got `int`"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "got null"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got `int`"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]", "got `int`"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", "missing"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
        (
            {"messages": [user("a"), {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[1].content[0]",
            "image parts are not supported",
        ),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"max_tokens": -5}, "max_tokens", "got -5"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "got 0"),
        ({"max_tokens": "many"}, "max_tokens", "got `str`"),
        ({"max_tokens": True}, "max_tokens", "got `bool`"),
        ({"temperature": 2.5}, "temperature", "<= 2.0, got 2.5"),
        ({"temperature": -0.1}, "temperature", "got -0.1"),
        ({"top_p": 0}, "top_p", "got 0"),
        ({"top_p": 1.1}, "top_p", "got 1.1"),
        ({"top_k": -2}, "top_k", "got -2"),
        ({"seed": 2**63}, "seed", "got"),
        ({"n": 17}, "n", "<= 16, got 17"),
        ({"n": 0}, "n", "got 0"),
        ({"logprobs": 5}, "logprobs", "got `int`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20, got 21"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
        ({"min_tokens": -1}, "min_tokens", "got -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most the 8 of max_tokens, got 9"),
        ({"presence_penalty": -2.1}, "presence_penalty", "got -2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "got 0"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty", "Expected `float` >= 0.01"),
        ({"repetition_penalty": 1e300}, "repetition_penalty", "Expected `float` <= 1000.0"),
        ({"min_p": 1.5}, "min_p", "got 1.5"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]", "<= 100.0"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "keys are token ids, got 'five'"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "keys are token ids, got '-5'"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024 tokens, got 1025"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object, json_schema, got 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
            "response_format.json_schema.schema",
            "cannot be followed: Invalid type: foo",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "string"}}}}},
            "response_format.json_schema.schema",
            'Unimplemented keys: ["not"]',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}},
            "response_format.json_schema.schema",
            "at most 65536 are followed",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "cannot be combined"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens", "cannot be combined"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 strings, got 17"),
        ({"stop": [3]}, "stop[0]", "got `int`"),
        ({"frequency_penalty": 3}, "frequency_penalty", "got 3"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "got `str`"),
        ({"documents": "text"}, "documents", "Expected `array | null`, got `str`"),
        ({"documents": ["text"]}, "documents[0]", "got `str`"),
        ({"documents": [{"id": "a", "text": "x"}, {"id": "b"}]}, "documents[1].text", "missing"),
        ({"documents": [{"id": "a", "text": None}]}, "documents[0].text", "got `null`"),
        ({"documents": [{"id": "", "text": "x"}]}, "documents[0].id", "length >= 1"),
        ({"documents": [{"id": 7, "text": "x"}]}, "documents[0].id", "got `int`"),
        ({"documents": [{"id": "a", "text": "x", "acl": "staff"}]}, "documents[0].acl", "got `str`"),
        ({"documents": [{"id": "a", "text": "x", "score": "high"}]}, "documents[0].score", "got `str`"),
        (
            {"documents": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]},
            "documents[1].id",
            "documents[0] as well",
        ),
        ({"firsttoken": {"polcy": "x"}}, "firsttoken.polcy", "unknown"),
        ({"firsttoken": {"max_input_tokens": 0}}, "firsttoken.max_input_tokens", "got 0"),
        ({"firsttoken": {"ttft_slo_ms": 0}}, "firsttoken.ttft_slo_ms", "got 0"),
        ({"firsttoken": {"bypass": "yes"}}, "firsttoken.bypass", "got `str`"),
        ({"firsttoken": {"policy": ""}}, "firsttoken.policy", "length >= 1, got ''"),
        ({"response_format": {"type": 5}}, "response_format.type", "got `int`"),
        ({"response_format": {"type": ["text"]}}, "response_format.type", "got `array`"),
        ({"response_format": {}}, "response_format.type", "missing"),
        ({"response_format": [1]}, "response_format", "got `array`"),
        ({"reasoning_effort": 3}, "reasoning_effort", "got `int`"),
        ({"reasoning_effort": ["low"]}, "reasoning_effort", "got `array`"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "got `str`"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**fields)
    assert caught.value.param == param
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": 0}, "invalid_value"),
        ({"temperature": -1}, "invalid_value"),
        ({"seed": 2**70}, "invalid_value"),
        ({"firsttoken": {"ttft_slo_ms": 0}}, "invalid_value"),
        ({"documents": [{"id": "", "text": "x"}]}, "invalid_value"),
        ({"documents": [{"id": "a"}]}, "invalid_value"),
        ({"messages": [{"role": "robot, got `x`", "content": "hi"}]}, "invalid_value"),
        ({"stop": ""}, "invalid_value"),
        ({"stop": [""]}, "invalid_value"),
        ({"firsttoken": {"policy": ""}}, "invalid_value"),
        ({"max_tokens": "0"}, "invalid_type"),
        ({"max_tokens": 2.5}, "invalid_type"),
        ({"temperature": None, "top_p": True}, "invalid_type"),
        ({"reasoning_effort": 3}, "invalid_type"),
        ({"response_format": {"type": 5}}, "invalid_type"),
        ({"messages": [{"role": "user", "content": None}]}, "invalid_type"),
    ],
)
def test_a_wrong_type_and_a_wrong_value_have_codes_of_their_own(fields: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**fields)
    assert caught.value.code == code


def test_an_unknown_part_type_is_shown_once_with_those_that_exist() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(messages=[{"role": "user", "content": [{"type": "zzz"}]}])
    assert str(caught.value) == (
        "Invalid 'messages[0].content[0].type': Invalid value 'zzz'; "
        "it must be one of text, refusal, image_url, input_audio, file."
    )


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "self"])
def test_template_variables_that_the_gateway_sets_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{name}' is reserved") as caught:
        read(chat_template_kwargs={"enable_thinking": False, name: None})
    assert (caught.value.param, caught.value.code) == ("chat_template_kwargs", "invalid_value")


def test_the_reasoning_effort_is_a_variable_of_the_template() -> None:
    assert read().template_kwargs == {}
    assert read(reasoning_effort=None, chat_template_kwargs=None).template_kwargs == {}
    assert read(reasoning_effort="low", chat_template_kwargs={"enable_thinking": True}).template_kwargs == {
        "reasoning_effort": "low",
        "enable_thinking": True,
    }
    by_name = read(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert by_name.template_kwargs == {"reasoning_effort": "high"}


def test_unknown_fields_stay_where_they_were() -> None:
    request = read(
        messages=[{"role": "user", "content": "hi", "x_note": {"a": [1, 2.50]}}],
        x_custom={"nested": True},
        reasoning_effort="low",
    )
    assert request.parts.messages[0]["x_note"] == {"a": [1, 2.5]}
    assert request.raw["x_custom"] == {"nested": True}
    assert request.raw["reasoning_effort"] == "low"


def test_turns_without_content_are_accepted_from_the_assistant() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        user("hi"),
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        user("and?"),
    ]
    assert read(messages=turns).parts.messages == tuple(turns)


def test_text_parts_are_kept_as_parts() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(messages=[{"role": "user", "content": content}]).parts.messages[0]["content"] == content


def test_documents_without_an_id_are_named_after_their_place_and_never_twice() -> None:
    documents = [{"text": "x"}, {"id": "doc-2", "text": "y"}, {"text": "z"}]
    assert [passage.id for passage in read(documents=documents).parts.passages] == ["doc-0", "doc-2", "doc-2'"]


def test_an_absent_acl_is_unlabelled_and_an_empty_one_is_nobody() -> None:
    passages = read(documents=[{"text": "x"}, {"text": "y", "acl": []}, {"text": "z", "acl": ["a"]}]).parts.passages
    assert [passage.acl for passage in passages] == [None, (), ("a",)]


def test_null_is_the_same_as_absent_for_optional_fields() -> None:
    names = ("documents", "firsttoken", "tools", "stop", "n", "max_tokens", "temperature", "seed", "stream_options")
    assert read(**dict.fromkeys(names)).parts == read().parts


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert read(max_tokens=10, max_completion_tokens=20).max_tokens == 20
    assert read(max_tokens=10).max_tokens == 10
    assert read().max_tokens is None


def test_sampling_takes_openai_defaults_and_the_given_values() -> None:
    sampling = read().sampling(7)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.stop) == (7, 1.0, 1.0, ())
    sampling = read(temperature=0, top_p=0.5, top_k=3, seed=11, stop="END", ignore_eos=True).sampling(7)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 3, 11)
    assert (sampling.stop, sampling.ignore_eos) == (("END",), True)


def test_sampling_takes_penalties_bias_and_log_probabilities() -> None:
    sampling = read().sampling(7)
    assert (sampling.logit_bias, sampling.top_logprobs, sampling.changes_logits) == ({}, None, False)
    sampling = read(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        min_p=0.1,
        min_tokens=9,
        logit_bias={"17": -100},
        logprobs=True,
        top_logprobs=3,
    ).sampling(7)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    # the window may leave less room than the request asks to fill
    assert (sampling.min_p, sampling.min_tokens, sampling.logit_bias) == (0.1, 7, {17: -100.0})
    assert sampling.top_logprobs == 3
    assert read(logprobs=True).sampling(7).top_logprobs == 0
    assert read(logprobs=False).sampling(7).top_logprobs is None


def test_every_choice_has_a_seed_of_its_own() -> None:
    request = read(n=3, seed=11)
    assert request.num_choices == 3
    assert [request.sampling(7, choice).seed for choice in range(3)] == [11, 12, 13]
    assert read(n=3).sampling(7, 2).seed is None


def test_response_format_becomes_the_schema_that_the_answer_follows() -> None:
    assert read(response_format={"type": "text"}).json_schema is None
    assert read(response_format={"type": "json_object"}).json_schema == '{"type":"object"}'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    request = read(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert request.json_schema is not None
    assert msgspec.json.decode(request.json_schema) == schema
    assert request.sampling(7).json_schema == request.json_schema


def test_without_the_grammar_library_json_is_refused_and_text_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammar._library.cache_clear()
    grammar._limits.cache_clear()
    try:
        with pytest.raises(InvalidRequestError, match="needs the package llguidance, which is not installed") as caught:
            read(response_format={"type": "json_object"})
        assert caught.value.param == "response_format.type"
        assert read(response_format={"type": "text"}).json_schema is None
    finally:
        grammar._library.cache_clear()


def test_bias_on_a_token_that_the_model_does_not_have_is_refused() -> None:
    read(logit_bias={"255": 1}).check_vocabulary(256)
    with pytest.raises(InvalidRequestError, match="token 256 is outside the vocabulary of 256 ids"):
        read(logit_bias={"256": 1}).check_vocabulary(256)


def test_fields_that_the_engine_does_not_know_are_listed_only_where_they_change_something() -> None:
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "repetition_penalty": 1.0}
    assert read(**neutral, response_format={"type": "text"}, tool_choice="auto").ignored == ()
    assert read(frequency_penalty=0.5, response_format={"type": "json_object"}).ignored == ()


def test_unknown_fields_with_a_value_are_listed_as_ignored() -> None:
    request = read(x_custom={"a": 1}, truncate_prompt_tokens=5, service_tier="auto", user=None, top_k=5, seed=1)
    assert request.ignored == ("x_custom", "truncate_prompt_tokens", "service_tier")
    assert read(min_p=0.5, reasoning_effort="low", extra_body={}).ignored == ("extra_body",)


def test_very_many_and_very_long_unknown_fields_are_cut() -> None:
    ignored = read(**{f"x{index}" + "y" * 5000: True for index in range(3000)}).ignored
    assert len(ignored) == 17
    assert ignored[0] == "x0" + "y" * 62 + "…"
    assert ignored[-1] == "… and 2984 more"
    assert max(map(len, ignored)) == 65


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(CompletionBody.__struct_fields__)


@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_any_json_in_any_field_is_read_or_refused_as_a_callers_mistake(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequestError):
        read_completion(msgspec.json.encode(make_body() | fields)).sampling(1)


@given(body=st.binary(max_size=40))
def test_any_bytes_are_refused_as_a_callers_mistake(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read_completion(body)
