"""Counts prompts for a model that computes elsewhere. Where a count is not exact it is never too low for text.

Three ways, best first; ``counting`` names the one in use, and every answer says it:

exact       tokenizer and chat template of the served model (a Hugging Face id, a folder, a ``.gguf`` file)
template    its tokenizer alone: texts are exact, what the template writes around them is an allowance
bytes       nothing known: UTF-8 bytes by script

The allowances (``CountingSettings``) hold for the templates of Llama 2 and 3, Mistral, Qwen 2.5 and 3, Gemma, Phi and
gpt-oss, their default system texts included; a server with a longer default system text needs a larger
``tokens_per_prompt``. The bytes: no tokenizer that covers all bytes makes more tokens of a text than it has bytes. Of a
word in plain Latin letters that could be spoken every third byte is free, without a space before it every fourth, since
every large vocabulary holds its syllables; English counts about three times what it is. All other scripts count bytes.

A part of a message that is no text (image, audio, file) counts a fixed number, see ``CountingSettings``.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from app.backend_settings import BackendSettings, CountingSettings
from app.backends.base import PromptEncoder
from app.errors import ConfigError, InvalidRequestError
from engine.errors import ModelError

ENCODINGS = ("o200k_base", "o200k_harmony", "cl100k_base")
TOKENIZER_FILES = (
    *("tokenizer*", "*.model", "special_tokens_map.json", "added_tokens.json", "chat_template*", "config.json"),
    *("generation_config.json", "vocab.json", "merges.txt"),
)
"""What is fetched of a Hugging Face id: the model itself computes elsewhere."""
MAX_OPENAI_TOKEN_BYTES = 128
MAX_CACHED_TEXTS = 4096
MAX_ENCODED_CHARS = 500_000
"""The package refuses a million; a longer text is encoded in parts."""
MAX_DENSE_CHARS = 50_000
"""The package refuses 200,000 tokens as well: parts of a text that has so many have at most four for a character."""
CUT_WINDOW_CHARS = 4096
"""Where a part may end, before its limit."""

_SPOKEN = re.compile(r" ?(?:[A-Z]?[a-z]{1,20})(?![A-Za-z0-9_\x80-\U0010ffff])")
_UNSPOKEN = re.compile(
    r"^[^aeiou]+$|[^ aeiouy]{4}|[aeiouy]{4}|[jvxz][^ aeiouy]|[^ aeiouy][jqvxz]|q(?!u)|[fghkpw][bdfgkmpqw]|(.)\1\1"
)
_WORD_BEGINNING = re.compile(r"(?<=[^\s]) (?=[^\W\d_])")
_COUNTED_FIELDS = ("name", "tool_call_id", "refusal", "reasoning_content", "reasoning")
_CALL_FIELDS = ("tool_calls", "function_call")


def load_counting_encoder(settings: BackendSettings) -> PromptEncoder:
    """The encoder that the settings name; takes seconds. Raises ``ConfigError`` that says what cannot be loaded."""
    counting = settings.tokenizer
    if counting.name is None:
        return EstimatingEncoder(counting, count_bytes, counting_name="utf-8 bytes by script (never too few)")
    if counting.name in ENCODINGS:
        encode, decode = openai_encoding(counting.name)
        return EstimatingEncoder(
            counting,
            lambda text: len(encode(text)),
            encode=encode,
            decode=decode,
            max_token_bytes=MAX_OPENAI_TOKEN_BYTES,
            counting_name=f"{counting.name}, template estimated (never too few)",
        )
    from engine.chat_template import ChatTokenizer
    from engine.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_path(_tokenizer_path(counting.name))
    except (ModelError, OSError, ValueError) as error:
        raise ConfigError(f"backend.tokenizer.name {counting.name!r} cannot be loaded: {error}") from error
    if counting.use_chat_template and tokenizer.chat_template:
        return TemplateEncoder(counting, ChatTokenizer(tokenizer, is_bare=True))
    return EstimatingEncoder(
        counting,
        lambda text: len(tokenizer.encode(text)),
        encode=tokenizer.encode,
        decode=partial(tokenizer.decode, skip_special=False),
        max_token_bytes=tokenizer.max_token_bytes,
        counting_name="tokenizer of the model, template estimated (never too few)",
    )


def _tokenizer_path(name: str) -> Path:
    """A folder or file as it is, a model of the catalogue, or the tokenizer's files alone of a Hugging Face id."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if "/" not in name or path.is_absolute():
        from engine.model_store import resolve_model

        return resolve_model(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(TOKENIZER_FILES)))


class TemplateEncoder:
    """Tokenizer and chat template of the served model: exact for text, by rule for other parts."""

    counting = "exact"
    is_exact = True

    def __init__(self, settings: CountingSettings, chat: Any) -> None:
        """``chat`` is a ``ChatTokenizer``."""
        self._settings = settings
        self._chat = chat

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> list[int]:
        """Token ids of the rendered prompt, without parts that are no text. Raises ``ValueError``."""
        token_ids: list[int] = self._chat.encode_chat([_text_only(message) for message in messages], tools, **kwargs)
        return token_ids

    def count_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> int:
        """Length of ``encode_chat`` and what the other parts count."""
        other = sum(count_other_parts(message, self._settings) for message in messages)
        return len(self.encode_chat(messages, tools, **kwargs)) + other

    def count_text(self, text: str) -> int:
        """Tokens of a text on its own."""
        num_tokens: int = self._chat.count_text(text)
        return num_tokens

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text on its own."""
        token_ids: list[int] = self._chat.tokenizer.encode(text)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self._chat.tokenizer.decode(token_ids, skip_special=False)
        return text

    @property
    def max_token_bytes(self) -> int:
        """UTF-8 bytes of the longest token."""
        longest: int = self._chat.tokenizer.max_token_bytes
        return longest


class EstimatingEncoder:
    """Counts texts one by one and allows for what an unknown template writes around them."""

    is_exact = False

    def __init__(
        self,
        settings: CountingSettings,
        count: Callable[[str], int],
        *,
        counting_name: str,
        encode: Callable[[str], list[int]] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_token_bytes: int = MAX_OPENAI_TOKEN_BYTES,
    ) -> None:
        """``encode`` and ``decode`` are absent where no tokenizer is known."""
        self._settings = settings
        self._count = count
        # The same system text, tools and history come with every request.
        self._count_cached = lru_cache(MAX_CACHED_TEXTS)(count)
        self._encode = encode
        self._decode = decode
        self.max_token_bytes = max_token_bytes
        self.counting = counting_name

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> list[int]:
        """Refused: without the template nobody knows them. Raises ``InvalidRequestError``."""
        raise InvalidRequestError(
            "The chat template of the upstream's model is not known here, so a conversation has no token ids.",
            param="messages",
            code="unsupported_value",
        )

    def count_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> int:
        """At least as many tokens as the rendered prompt has."""
        settings = self._settings
        num_tokens = settings.tokens_per_prompt + sum(self._count_message(message) for message in messages)
        if tools:
            num_tokens += settings.tokens_per_tool_prompt
            # Some templates print JSON with indents, some without: the longer one counts.
            num_tokens += sum(settings.tokens_per_tool + self._count_json(tool) for tool in tools)
        if kwargs:
            num_tokens += self._count_json(kwargs)
        return num_tokens

    def count_text(self, text: str) -> int:
        """Tokens of a text on its own."""
        return self._count(text)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text on its own. Raises ``InvalidRequestError`` where no tokenizer is known."""
        if self._encode is None:
            raise InvalidRequestError(
                "No tokenizer is configured for the upstream's model (backend.tokenizer.name).",
                code="unsupported_value",
            )
        return self._encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids. Raises ``InvalidRequestError`` where no tokenizer is known."""
        if self._decode is None:
            raise InvalidRequestError(
                "No tokenizer is configured for the upstream's model (backend.tokenizer.name).",
                code="unsupported_value",
            )
        return self._decode(token_ids)

    def _count_message(self, message: Mapping[str, Any]) -> int:
        settings = self._settings
        content = message.get("content")
        num_tokens = settings.tokens_per_message + count_other_parts(message, settings)
        if isinstance(content, str):
            num_tokens += self._count_one(content)
        elif isinstance(content, list):
            for part in content:
                num_tokens += sum(self._count_one(text) + 1 for text in (_part_text(part),) if text is not None)
        for name in _COUNTED_FIELDS:
            if isinstance(value := message.get(name), str) and value:
                num_tokens += self._count_one(value) + 2
        for name in _CALL_FIELDS:
            calls = message.get(name)
            for call in calls if isinstance(calls, list) else [calls] if calls else ():
                num_tokens += settings.tokens_per_tool + self._count_json(call)
        return num_tokens

    def _count_json(self, value: Any) -> int:
        text = msgspec.json.encode(value).decode()
        return max(self._count_one(text), self._count_one(msgspec.json.format(text, indent=4)))

    def _count_one(self, text: str) -> int:
        return self._count_cached(text) if len(text) <= 4096 else self._count(text)


def count_bytes(text: str) -> int:
    """Tokens of a text by its UTF-8 bytes: fewer of a word that can be spoken, all else one for each.

    >>> count_bytes("The house"), count_bytes("x9$"), count_bytes("家")
    (7, 3, 3)
    """
    num_tokens = len(text.encode("utf-8", "replace"))
    for match in _SPOKEN.finditer(text):
        word = match.group()
        if match.start() and text[match.start() - 1].isalnum() and not word.startswith(" "):
            continue
        if _UNSPOKEN.search(word.lower()) is None:
            num_tokens -= len(word) // (3 if word.startswith(" ") else 4)
    return num_tokens


def count_other_parts(message: Mapping[str, Any], settings: CountingSettings) -> int:
    """Tokens of the parts of a message that are no text, by rule."""
    content = message.get("content")
    if not isinstance(content, list):
        return 0
    num_tokens = 0
    for part in content:
        if _part_text(part) is not None:
            continue
        image = part.get("image_url") if isinstance(part, Mapping) else None
        if image is None:
            num_tokens += settings.tokens_per_file
        elif isinstance(image, Mapping) and image.get("detail") == "low":
            num_tokens += settings.tokens_per_small_image
        else:
            num_tokens += settings.tokens_per_image
    return num_tokens


class OpenAIEncoding(NamedTuple):
    """One of OpenAI's encodings."""

    encode: Callable[[str], list[int]]
    """Of ordinary text: what looks like a special token is none."""
    decode: Callable[[Sequence[int]], str]


def openai_encoding(name: str) -> OpenAIEncoding:
    """Encodes ordinary text as OpenAI's models do. Raises ``ConfigError`` where the ranks are not on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the package opens its data in an old way, on import
        try:
            import bpe_openai
        except ImportError as error:
            raise ConfigError(f"backend.tokenizer.name {name!r} needs the package bpe-openai: {error}") from error
        encoding: Any = bpe_openai.get_encoding("o200k_base" if name == "o200k_harmony" else name)
    return OpenAIEncoding(partial(_encode_ordinary, encoding.encode_ordinary), encoding.decode)


def _encode_ordinary(encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
    if len(text) > MAX_ENCODED_CHARS:
        return [token for piece in _pieces(text, MAX_ENCODED_CHARS) for token in _encode_ordinary(encode, piece)]
    try:
        return list(encode(text))
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8
        return _encode_ordinary(encode, text.encode("utf-8", "replace").decode())
    except ValueError:  # more tokens than the package takes at once: a token or more for each character
        if len(text) <= MAX_DENSE_CHARS:
            raise
        return [token for piece in _pieces(text, MAX_DENSE_CHARS) for token in _encode_ordinary(encode, piece)]


def _pieces(text: str, max_chars: int) -> Iterator[str]:
    """A long text in parts that have the same tokens: cut before a word, where all encodings cut as well."""
    start = 0
    while len(text) - start > max_chars:
        end = start + max_chars
        cuts = [match.start() for match in _WORD_BEGINNING.finditer(text, end - CUT_WINDOW_CHARS, end)]
        end = cuts[-1] if cuts else end
        yield text[start:end]
        start = end
    yield text[start:]


def _part_text(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else None
    for kind in ("text", "refusal"):
        if part.get("type") == kind and isinstance(part.get(kind), str):
            text: str = part[kind]
            return text
    return None


def _text_only(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list) or all(_part_text(part) is not None for part in content):
        return message
    return {**message, "content": [part for part in content if _part_text(part) is not None]}
