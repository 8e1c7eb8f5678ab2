"""Renders a conversation with the model's chat template and encodes it: the exact ids that the engine computes.

The template runs in the sandbox that transformers uses, with the same filters and globals, so a model's template gives
the same text here and there. Three things are added. Look-alikes of control tokens inside messages stay ordinary text
(``engine.look_alikes``). Where a template does not know tools, they are written as text (``engine.chat_messages``).
Where a model has no template, ``CHATML_TEMPLATE`` is used.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.chat_messages import describe_tools, normalise_messages, normalise_tools
from engine.errors import ModelError
from engine.look_alikes import LookAlikes
from engine.tokenizer import Tokenizer

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""For models without a template: ChatML, as most of them were trained on."""

_RENDERING_VERSION = "1"  # counts changes of how tools and roles are written around the template
_RESERVED = ("messages", "tools", "add_generation_prompt", "documents")


class ChatTokenizer:
    """Chat template and tokenizer of one model; satisfies ``reducer.tokens.TokenCounter``. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, *, is_bare: bool = False) -> None:
        """``template`` is Jinja source; ``None`` takes the model's own, else ``CHATML_TEMPLATE``.

        ``is_bare`` leaves out what is added to the template here: the prompt is the one of another engine, which takes
        control tokens in messages for what they look like and drops tools that the template does not know.

        Raises ModelError when the source is no valid template.
        """
        self.tokenizer = tokenizer
        self.template = template or tokenizer.chat_template or CHATML_TEMPLATE
        self.version = hashlib.sha256(f"{_RENDERING_VERSION}\n{self.template}".encode()).hexdigest()
        """Digest of all that turns messages into text."""
        self.knows_tools = re.search(r"\btools\b", self.template) is not None
        """The template renders tools itself."""
        self._knows_developer = "developer" in self.template
        self._is_bare = is_bare
        self._look_alikes = LookAlikes(tokenizer.control_tokens)
        try:
            self._compiled = _make_environment().from_string(self.template)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def from_path(cls, path: Path) -> "ChatTokenizer":
        """Tokenizer and template of a ``.gguf`` file or a Hugging Face folder. Raises ModelError naming the file."""
        return cls(Tokenizer.from_path(path))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of the whole prompt: template, tools, control tokens, generation prompt, BOS where the model wants one.

        ``kwargs`` are further template variables (``enable_thinking``). Raises ValueError for messages or tools of a
        wrong shape, naming the field, and for what the template itself refuses, with its message.
        """
        text, originals = self._render(messages, tools, add_generation_prompt, kwargs)
        if originals:
            token_ids = []
            for piece, token_id in self.tokenizer.split_at_control_tokens(text):
                if token_id is not None:
                    token_ids.append(token_id)
                else:
                    token_ids.extend(self.tokenizer.encode(piece.translate(originals)))
        else:
            token_ids = self.tokenizer.encode(text, special=True)
        bos_token_id = self.tokenizer.bos_token_id
        if (
            self.tokenizer.add_bos_token
            and not self._is_bare
            and bos_token_id is not None
            and token_ids[:1] != [bos_token_id]
        ):
            token_ids.insert(0, bos_token_id)
        return token_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt as text, to look at: encoding it again may see look-alikes as control tokens."""
        text, originals = self._render(messages, tools, add_generation_prompt, kwargs)
        return text.translate(originals)

    def count_text(self, text: str) -> int:
        """Tokens of ``text`` on its own, as ordinary text."""
        return len(self.tokenizer.encode(text))

    def count_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> int:
        """Exact length of ``encode_chat`` of the same arguments."""
        return len(self.encode_chat(messages, tools, **kwargs))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
    ) -> tuple[str, dict[int, str]]:
        """The prompt with sentinels for look-alikes, and what they stand for."""
        reserved = [name for name in _RESERVED if name in kwargs]
        if reserved:
            raise ValueError(f"the template variable {reserved[0]!r} cannot be set")
        try:
            chat, functions = normalise_messages(messages), normalise_tools(tools)
            if not self.knows_tools and not self._is_bare:
                chat, functions = describe_tools(chat, functions), []
            if not self._knows_developer:
                for message in chat:
                    message["role"] = "system" if message["role"] == "developer" else message["role"]
            originals: dict[int, str] = {}
            variables: dict[str, Any] = kwargs
            if not self._is_bare:
                masked = self._look_alikes.mask([chat, functions, kwargs], template=self.template)
                (chat, functions, variables), originals = masked.value, masked.originals
            text = self._compiled.render(
                self.tokenizer.named_tokens
                | variables
                | {
                    "messages": chat,
                    "tools": functions or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except RecursionError:
            raise ValueError("messages or tools are nested too deeply") from None
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error.message or error}") from error
        except (TypeError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
            # a template that joins or looks up what these messages do not have
            raise ValueError(f"the chat template cannot render these messages: {error}") from error
        return text, originals


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes < > & for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
