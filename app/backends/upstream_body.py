"""Writes the request that goes to an upstream: the client's own JSON with only what the gateway decides exchanged.

What is not exchanged keeps its bytes: numbers stay ``1.0`` or ``1e3``, strings keep their escapes, unknown fields stay.
That holds below ``messages`` as well: a message that the reducer left alone is the client's, and of one that it put
documents in front of, every other field and content part is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app.backend_settings import BackendSettings
from app.waterfall import Timeline

OWN_FIELDS = ("documents", "firsttoken")
"""Fields that are meant for the gateway."""
ISOLATION_FIELDS = ("cache_salt", "extra_key")
"""Fields that choose whose cache is used; the caller's are discarded."""
NESTED_ISOLATION_FIELDS = {"nvext": ("cache_salt", "tenant_id")}

_RawObject = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """One request to pass on."""

    request_id: str
    body: bytes
    """As the client sent it."""
    messages: Sequence[Mapping[str, Any]]
    """To send instead of the client's."""
    tools: Sequence[Mapping[str, Any]]
    cache_salt: str
    streams: bool
    max_tokens: int | None = None
    """Output tokens to ask for instead of what the client asked; ``None`` leaves that as it is."""
    timeline: Timeline | None = None
    """Where to note what happens before it is sent."""


def upstream_body(request: RelayRequest, settings: BackendSettings) -> bytes:
    """The body to send."""
    fields = msgspec.json.decode(request.body, type=_RawObject)
    for name in (*OWN_FIELDS, *ISOLATION_FIELDS):
        fields.pop(name, None)
    for name, isolating in NESTED_ISOLATION_FIELDS.items():
        if name in fields:
            _remove(fields, name, isolating)
    fields["model"] = _raw(settings.model)
    fields["messages"] = _messages(fields["messages"], request.messages)
    if request.tools:
        fields["tools"] = _tools(fields["tools"], request.tools)
    if request.streams:
        fields["stream_options"] = _with_usage(fields.get("stream_options"))
    if request.max_tokens is not None:
        given = [name for name in ("max_tokens", "max_completion_tokens") if not _is_null(fields.get(name))]
        default = "max_completion_tokens" if settings.flavour == "openai" else "max_tokens"
        for name in given or [default]:
            fields[name] = _raw(request.max_tokens)
    if settings.salt_field:
        _set(fields, settings.salt_field, _raw(request.cache_salt))
    return msgspec.json.encode(fields)


def routing_key(request: RelayRequest) -> bytes:
    """What requests with the same beginning share: the tenant, the tools, the system messages, the client's hint.

    A prompt without tools and system messages has the first 1,024 characters of its first message for a beginning.
    """
    parts: list[Any] = [request.cache_salt, _routing_hint(request.body)]
    system: list[Any] = []
    for message in request.messages:
        if message.get("role") not in ("system", "developer"):
            break
        system.append([message.get("role"), message.get("content")])
    if system or request.tools:
        parts += [list(request.tools), system]
    elif request.messages:
        content = request.messages[0].get("content")
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
        parts.append(text[:1024])
    return msgspec.json.encode(parts)


class _Hint(msgspec.Struct):
    prompt_cache_key: Any = None


def _routing_hint(body: bytes) -> str:
    hint = msgspec.json.decode(body, type=_Hint).prompt_cache_key
    return hint if isinstance(hint, str) else ""


def _messages(received: msgspec.Raw, wanted: Sequence[Mapping[str, Any]]) -> msgspec.Raw:
    """``wanted`` as JSON, with the bytes of ``received`` wherever the values are the same."""
    raws = msgspec.json.decode(received, type=list[msgspec.Raw])
    originals: list[dict[str, Any]] = msgspec.json.decode(received)
    if len(originals) == len(wanted) and all(a == b for a, b in zip(originals, wanted, strict=True)):
        return received
    written: list[msgspec.Raw] = []
    position = 0
    for message in wanted:
        same = next((i for i in range(position, len(originals)) if originals[i] == message), None)
        if same is not None:
            written.append(raws[same])
            position = same + 1
            continue
        like = next((i for i in range(position, len(originals)) if _is_like(originals[i], message)), None)
        if like is None:
            written.append(_raw(message))
        else:
            written.append(_message(raws[like], originals[like], message))
            position = like + 1
    return _raw(written)


def _is_like(original: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether two messages differ in their content alone, where one holds the other's."""
    if original.keys() | {"content"} != message.keys() | {"content"}:
        return False
    if any(value != original[name] for name, value in message.items() if name != "content"):
        return False
    before, after = original.get("content"), message.get("content")
    if isinstance(before, str) and isinstance(after, str):
        return after.endswith(before)
    return before is None or (isinstance(before, list) and isinstance(after, list))


def _message(raw: msgspec.Raw, original: Mapping[str, Any], message: Mapping[str, Any]) -> msgspec.Raw:
    fields = msgspec.json.decode(raw, type=_RawObject)
    for name, value in message.items():
        if name in fields and original[name] == value:
            continue
        before = original.get(name)
        if isinstance(value, list) and isinstance(before, list):
            fields[name] = _items(fields[name], before, value)
        else:
            fields[name] = _raw(value)
    return _raw(fields)


def _items(raw: msgspec.Raw, originals: Sequence[Any], wanted: Sequence[Any]) -> msgspec.Raw:
    """A list as JSON, with the bytes of each item that is still there."""
    raws = msgspec.json.decode(raw, type=list[msgspec.Raw])
    written: list[msgspec.Raw] = []
    position = 0
    for item in wanted:
        same = next((i for i in range(position, len(originals)) if originals[i] == item), None)
        written.append(_raw(item) if same is None else raws[same])
        position = position if same is None else same + 1
    return _raw(written)


def _tools(received: msgspec.Raw, wanted: Sequence[Mapping[str, Any]]) -> msgspec.Raw:
    """The client's bytes where the order of tools and keys is the same, else the canonical ones."""
    encoded = msgspec.json.encode(list(wanted))
    is_same = encoded == msgspec.json.encode(msgspec.json.decode(received))
    return received if is_same else msgspec.Raw(encoded)


def _with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    fields: _RawObject = {} if _is_null(options) else msgspec.json.decode(options, type=_RawObject)  # type: ignore[arg-type]
    return _raw({**fields, "include_usage": True})


def _remove(fields: _RawObject, name: str, inner: Sequence[str]) -> None:
    value = msgspec.json.decode(fields[name])
    if isinstance(value, dict) and not value.keys().isdisjoint(inner):
        below = msgspec.json.decode(fields[name], type=_RawObject)
        fields[name] = _raw({key: raw for key, raw in below.items() if key not in inner})


def _set(fields: _RawObject, path: Sequence[str], value: msgspec.Raw) -> None:
    name, *rest = path
    if not rest:
        fields[name] = value
        return
    known = msgspec.json.decode(fields[name]) if name in fields else None
    below = msgspec.json.decode(fields[name], type=_RawObject) if isinstance(known, dict) else {}
    _set(below, rest, value)
    fields[name] = _raw(below)


def _is_null(value: msgspec.Raw | None) -> bool:
    return value is None or bytes(value).strip() == b"null"


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
