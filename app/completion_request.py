"""Reads a request body into a checked ``CompletionRequest``, or says which field is wrong."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from app.errors import InvalidRequestError
from app.schemas import (
    PART_TYPES,
    RESPONSE_FORMATS,
    ROLES,
    ChatMessage,
    CompletionBody,
    Document,
    DocumentAccess,
    ImagePart,
    Overrides,
    RefusalPart,
    RelayBody,
    ResponseFormat,
    TextPart,
)
from app.tool_choice import NO_TOOLS, ToolChoice, read_tool_choice
from engine.errors import GrammarError
from engine.grammar import ANY_OBJECT, check_schema
from engine.sampling_params import SamplingParams
from reducer.prompt import AccessRule, Passage, PromptParts

MAX_STOP_STRINGS = 16
MAX_NUM_BIASED_TOKENS = 1024
MAX_NUM_DOCUMENTS = 10_000

MAX_NUM_IGNORED = 16
"""Unknown fields that an answer names; further ones are only counted."""
MAX_FIELD_NAME_CHARS = 64
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "self")
"""Variables of the chat template that the gateway fills itself."""

_KNOWN_FIELDS = frozenset(CompletionBody.__struct_fields__)
_LOCATED = re.compile(r"(?P<text>.*) - at `\$\.?(?P<path>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]+)`")

B = TypeVar("B", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request, checked, with everything that the client sent still in ``raw``."""

    body: CompletionBody
    raw: dict[str, Any]
    """The decoded JSON document, unknown fields included."""
    parts: PromptParts
    overrides: Overrides
    max_tokens: int | None
    """Output tokens that the client asks for, whichever of the two fields named them."""
    stop: tuple[str, ...]
    logit_bias: Mapping[int, float]
    """By token id."""
    json_schema: str | None
    """The schema that the answer has to follow, as JSON."""
    ignored: tuple[str, ...]
    """Fields that the embedded engine does not honour; the answer lists them."""
    tool_choice: ToolChoice = NO_TOOLS
    """How the embedded engine is to use the tools."""
    unsent_tools: tuple[Mapping[str, Any], ...] = ()
    """What the model reads beside messages and tools: functions of the old kind, a schema for the answer."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Further variables of the chat template. Those of ``chat_template_kwargs`` win."""
        effort = self.body.reasoning_effort
        variables = {} if effort is None else {"reasoning_effort": effort}
        return variables | (self.body.chat_template_kwargs or {})

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries usage."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def num_choices(self) -> int:
        """Answers to the one prompt."""
        return self.body.n or 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ``InvalidRequestError`` for a biased token that the served model does not have."""
        for token_id in self.logit_bias:
            if token_id >= vocab_size:
                text = f"Invalid 'logit_bias': token {token_id} is outside the vocabulary of {vocab_size} ids."
                raise InvalidRequestError(text, param="logit_bias", code="invalid_value")

    def sampling(self, max_tokens: int, choice: int = 0, *, visible_tokens: tuple[str, ...] = ()) -> SamplingParams:
        """The engine's parameters for an output of at most ``max_tokens``; choices with a seed each get their own."""
        body = self.body
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(body.min_tokens or 0, max_tokens),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            logit_bias=dict(self.logit_bias),
            seed=None if body.seed is None else body.seed + choice,
            stop=self.stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            json_schema=self.tool_choice.json_schema or self.json_schema,
            visible_tokens=visible_tokens,
        )


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body. Raises ``InvalidRequestError`` for anything else."""
    if not body:
        raise InvalidRequestError("The request body is empty; it must be a JSON object.", code="invalid_json")
    try:
        document = msgspec.json.decode(body)
    except msgspec.MsgspecError as error:
        message = f"The request body is not valid JSON: {error}"
        raise InvalidRequestError(message, code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError("The request body is nested too deeply.", code="invalid_json") from None
    if not isinstance(document, dict):
        message = f"The request body must be a JSON object, got {_json_type(document)}."
        raise InvalidRequestError(message, code="invalid_type")
    return document


def convert_body(raw: Mapping[str, Any], kind: type[B]) -> B:
    """Checks a decoded document against a Struct. Raises ``InvalidRequestError`` that names the field."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), raw) from None


def read_completion(body: bytes) -> CompletionRequest:
    """Reads the body of a chat completion or of a compaction. CPU-heavy for a large one."""
    raw = decode_object(body)
    checked = convert_body(raw, CompletionBody)
    _check_messages(checked.messages)
    tool_choice = read_tool_choice(
        raw.get("tools") or (), checked.tool_choice, is_parallel=checked.parallel_tool_calls is not False
    )
    _check_output_fields(checked, tool_choice)
    _check_template_kwargs(checked.chat_template_kwargs or {})
    return CompletionRequest(
        body=checked,
        raw=raw,
        parts=PromptParts(
            messages=tuple(raw["messages"]),
            tools=tuple(raw.get("tools") or ()),
            passages=_passages(checked.documents or ()),
        ),
        overrides=checked.firsttoken or Overrides(),
        max_tokens=checked.max_completion_tokens or checked.max_tokens,
        stop=_stop_strings(checked.stop),
        logit_bias=_logit_bias(checked.logit_bias or {}),
        json_schema=_json_schema(checked.response_format),
        ignored=_unknown_fields(raw),
        tool_choice=tool_choice,
    )


def read_relayed(body: bytes) -> CompletionRequest:
    """Reads the body of a completion that an upstream answers: what the gateway does not need, the upstream judges."""
    raw = decode_object(body)
    checked = convert_body(raw, RelayBody)
    _check_template_kwargs(checked.chat_template_kwargs or {})
    names = [name for name in RelayBody.__struct_fields__ if name not in ("messages", "tools", "functions")]
    known = {name: getattr(checked, name) for name in names if name in _KNOWN_FIELDS}
    effort = checked.reasoning_effort
    known["reasoning_effort"] = effort if isinstance(effort, str) else None
    return CompletionRequest(
        body=CompletionBody(messages=[], **known),
        raw=raw,
        parts=PromptParts(
            messages=tuple(raw["messages"]),
            tools=tuple(checked.tools or ()),
            passages=_passages(checked.documents or ()),
        ),
        overrides=checked.firsttoken or Overrides(),
        max_tokens=checked.max_completion_tokens or checked.max_tokens,
        stop=(),
        logit_bias={},
        json_schema=None,
        ignored=(),
        unsent_tools=_unsent_tools(checked),
    )


def _unsent_tools(body: RelayBody) -> tuple[Mapping[str, Any], ...]:
    tools = [{"type": "function", "function": function} for function in body.functions or ()]
    schema = body.response_format.get("json_schema") if isinstance(body.response_format, dict) else None
    if isinstance(schema, dict):
        name = schema.get("name")
        function = {**schema, "name": name if isinstance(name, str) and name else "response_format"}
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def _field_error(text: str, raw: Any) -> InvalidRequestError:
    located = _LOCATED.fullmatch(text)
    what, path = (located["text"], located["path"]) if located is not None else (text, "")
    # A decoder's text ends with the type where it is wrong; where the value is, it says what would be allowed.
    code = "invalid_type" if what.startswith("Expected") and ", got " in what else "invalid_value"
    if (missing := _MISSING.fullmatch(what)) is not None:
        path, what = _join(path, missing["field"]), "the required field is missing"
    elif (unknown := _UNKNOWN.fullmatch(what)) is not None:
        path, what = _join(path, unknown["field"]), "the field is unknown"
    elif path.endswith(".role") and what.startswith("Invalid enum value"):
        what = f"{what}; it must be one of {', '.join(ROLES)}"
    elif path.endswith(".type") and what.startswith("Invalid value"):
        what = f"{what}; it must be one of {', '.join(PART_TYPES)}"
    elif (
        what.startswith("Expected")
        and ", got " not in what
        and isinstance(value := _value_at(raw, path), int | float | str)
    ):
        what = f"{what}, got {_short(value)}"
    return InvalidRequestError(f"Invalid '{path}': {what}." if path else what, param=path or None, code=code)


def _value_at(document: Any, path: str) -> Any:
    """The value that a decoder's path such as ``messages[0].role`` points to; ``None`` where it leads nowhere."""
    value = document
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        elif name and isinstance(value, dict):
            value = value.get(name)
        else:
            return None
    return value


def _short(value: float | str) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        if message.content is None and message.role not in ("assistant", "function"):
            text = f"Invalid '{where}': a {message.role} message needs a string or a list of parts, got null."
            raise InvalidRequestError(text, param=where, code="invalid_type")
        if not isinstance(message.content, list):
            continue
        for position, part in enumerate(message.content):
            if not isinstance(part, TextPart | RefusalPart):
                kind = "image" if isinstance(part, ImagePart) else type(part).__name__.removesuffix("Part").lower()
                text = f"Invalid '{where}[{position}]': {kind} parts are not supported; this model reads text only."
                raise InvalidRequestError(text, param=f"{where}[{position}]", code="unsupported_value")


def _check_output_fields(body: CompletionBody, tool_choice: ToolChoice) -> None:
    """Refuses fields that contradict each other."""
    if body.top_logprobs is not None and not body.logprobs:
        text = "Invalid 'top_logprobs': it needs logprobs to be true."
        raise InvalidRequestError(text, param="top_logprobs", code="invalid_value")
    max_tokens = body.max_completion_tokens or body.max_tokens
    if body.min_tokens and max_tokens is not None and body.min_tokens > max_tokens:
        text = f"Invalid 'min_tokens': at most the {max_tokens} of max_tokens, got {body.min_tokens}."
        raise InvalidRequestError(text, param="min_tokens", code="invalid_value")
    has_format = body.response_format is not None and body.response_format.type != "text"
    if has_format or tool_choice.json_schema is not None:
        other = "tool_choice" if tool_choice.json_schema is not None else "response_format"
        for name in ("ignore_eos", "min_tokens"):
            if getattr(body, name):
                text = f"Invalid '{name}': it cannot be combined with {other}, whose JSON ends the answer."
                raise InvalidRequestError(text, param=name, code="invalid_value")


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    if len(bias) > MAX_NUM_BIASED_TOKENS:
        text = f"Invalid 'logit_bias': at most {MAX_NUM_BIASED_TOKENS} tokens, got {len(bias)}."
        raise InvalidRequestError(text, param="logit_bias", code="invalid_value")
    for name in bias:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            text = f"Invalid 'logit_bias': keys are token ids, got {_short(name)}."
            raise InvalidRequestError(text, param="logit_bias", code="invalid_value")
    return {int(name): value for name, value in bias.items()}


def _json_schema(response_format: ResponseFormat | None) -> str | None:
    """The schema that the answer has to follow. Raises ``InvalidRequestError`` where it cannot."""
    if response_format is None or response_format.type == "text":
        return None
    kind, where = response_format.type, "response_format.json_schema.schema"
    if kind not in RESPONSE_FORMATS:
        text = f"Invalid 'response_format.type': it must be one of {', '.join(RESPONSE_FORMATS)}, got {_short(kind)}."
        raise InvalidRequestError(text, param="response_format.type", code="unsupported_value")
    schema = ANY_OBJECT
    if kind == "json_schema":
        if response_format.json_schema is None or response_format.json_schema.schema is None:
            text = f"Invalid '{where}': the required field is missing."
            raise InvalidRequestError(text, param=where, code="invalid_value")
        schema = msgspec.json.encode(response_format.json_schema.schema).decode()
    try:
        check_schema(schema)
    except GrammarError as error:
        param = where if kind == "json_schema" else "response_format.type"
        raise InvalidRequestError(f"Invalid '{param}': {error}.", param=param, code="unsupported_value") from None
    return schema


def _check_template_kwargs(variables: Mapping[str, Any]) -> None:
    for name in RESERVED_VARIABLES:
        if name in variables:
            text = f"Invalid 'chat_template_kwargs': the variable {name!r} is reserved; the gateway sets it itself."
            raise InvalidRequestError(text, param="chat_template_kwargs", code="invalid_value")


def _unknown_fields(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of fields that have a value and no meaning here, short enough for an answer."""
    names = [name for name, value in raw.items() if value is not None and name not in _KNOWN_FIELDS]
    shown = [name if len(name) <= MAX_FIELD_NAME_CHARS else f"{name[:MAX_FIELD_NAME_CHARS]}…" for name in names]
    if len(shown) > MAX_NUM_IGNORED:
        shown[MAX_NUM_IGNORED:] = [f"… and {len(shown) - MAX_NUM_IGNORED} more"]
    return tuple(shown)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        text = f"Invalid 'stop': at most {MAX_STOP_STRINGS} strings, got {len(strings)}."
        raise InvalidRequestError(text, param="stop", code="invalid_value")
    if not all(strings):
        raise InvalidRequestError(
            "Invalid 'stop': it must not hold an empty string.", param="stop", code="invalid_value"
        )
    return strings


def _passages(documents: Sequence[Document]) -> tuple[Passage, ...]:
    if len(documents) > MAX_NUM_DOCUMENTS:
        text = f"Invalid 'documents': at most {MAX_NUM_DOCUMENTS} documents, got {len(documents)}."
        raise InvalidRequestError(text, param="documents", code="invalid_value")
    first_index: dict[str, int] = {}
    for index, document in enumerate(documents):
        if document.id is not None and (first := first_index.setdefault(document.id, index)) != index:
            where = f"documents[{index}].id"
            text = f"Invalid '{where}': {document.id!r} is the id of documents[{first}] as well; ids must be unique."
            raise InvalidRequestError(text, param=where, code="invalid_value")
    return tuple(
        Passage(
            id=_name_of(index, first_index) if document.id is None else document.id,
            text=document.text,
            title=document.title,
            source=document.source,
            score=document.score,
            acl=_acl(document.acl),
            metadata=document.metadata or {},
        )
        for index, document in enumerate(documents)
    )


def _acl(acl: list[str] | DocumentAccess | None) -> tuple[str, ...] | AccessRule | None:
    """Of an access label on the wire, the one that the reducer reads."""
    if isinstance(acl, DocumentAccess):
        any_of = None if acl.any_of is None else tuple(acl.any_of)
        return AccessRule(any_of=any_of, all_of=tuple(acl.all_of), deny=tuple(acl.deny))
    return None if acl is None else tuple(acl)


def _name_of(index: int, taken: Mapping[str, int]) -> str:
    """A name for the document at ``index`` that no other document of the request has."""
    name = f"doc-{index}"
    while name in taken:
        name += "'"
    return name


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
