"""What clients send: OpenAI's request shapes with ``documents`` and ``firsttoken`` added.

The Structs check the fields that the gateway understands. Unknown fields are allowed and stay in the decoded document,
which is what goes on to the reducer and the engine: a message is never rebuilt from its Struct.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
MAX_NUM_CHOICES = 16
MAX_TOP_LOGPROBS = 20
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
PART_TYPES = ("text", "refusal", "image_url", "input_audio", "file")

PositiveInt = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class TextPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of a message."""

    text: str


class RefusalPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal that the assistant gave earlier."""

    refusal: str


class ImagePart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """An image; models that read text only refuse it."""

    image_url: Any = None


class AudioPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_audio"):
    """A recording; models that read text only refuse it."""

    input_audio: Any = None


class FilePart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="file"):
    """A file; models that read text only refuse it."""

    file: Any = None


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call's function and its arguments, which OpenAI sends as a string of JSON."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call that the assistant made earlier."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model may call."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class DocumentAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may read a document: one of ``any_of``, all of ``all_of``, none of ``deny``."""

    any_of: list[str] | None = None
    """Absent asks for none of them, an empty list admits nobody."""
    all_of: list[str] = []
    deny: list[str] = []
    """Without ``any_of`` and ``all_of`` the document is unlabelled for everybody else."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One retrieved passage."""

    text: str
    id: Annotated[str, Meta(min_length=1)] | None = None
    """Unique within the request; one that is missing is named after its place."""
    title: str | None = None
    source: str | None = None
    score: float | None = None
    acl: list[str] | DocumentAccess | None = None
    """Groups any of which may read it, or a rule; absent is unlabelled, an empty list is nobody."""
    metadata: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk; of upstreams that know it."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A schema that the answer has to follow, ``strict`` or not."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form that the client wants for the answer."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class Overrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may decide about its own reduction. Ours alone, so a misspelt key is refused."""

    policy: Annotated[str, Meta(min_length=1)] | None = None
    max_input_tokens: PositiveInt | None = None
    ttft_slo_ms: Annotated[float, Meta(gt=0)] | None = None
    reduce_deadline_ms: Annotated[float, Meta(ge=0)] | None = None
    """Time limit of the reduction, from its begin; then the best partial result is sent, marked as such."""
    bypass: bool | None = None
    waterfall: bool | None = None
    """Tell the stages of the time to the first token, in the answer and in the receipt."""


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``/v1/chat/completions`` and of ``/v1/compact``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: str | None = None
    documents: list[Document] | None = None
    firsttoken: Overrides | None = None
    tools: list[ToolDefinition] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """A variable of the chat template; templates that do not know it leave it out."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_NUM_CHOICES)] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=1000.0)] | None = None
    response_format: ResponseFormat | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class RelayMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message on its way to an upstream: content parts of every kind pass."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None


class RelayBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway reads of a completion that an upstream answers; the upstream judges all other fields."""

    messages: Annotated[list[RelayMessage], Meta(min_length=1)]
    model: str | None = None
    documents: list[Document] | None = None
    firsttoken: Overrides | None = None
    tools: list[dict[str, Any]] | None = None
    functions: list[dict[str, Any]] | None = None
    response_format: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_NUM_CHOICES)] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``/tokenize``: a text, or a conversation as the engine would see it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[ToolDefinition] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``/detokenize``."""

    tokens: list[TokenId]
    model: str | None = None
