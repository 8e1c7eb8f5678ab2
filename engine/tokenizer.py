"""The served model's tokenizer: text to ids and ids to the bytes they stand for.

Two encoders share one vocabulary. One knows the control tokens (``<|im_end|>`` is one id) and encodes what the chat
template writes. The other treats their look-alikes as ordinary text and encodes what users write. They are two objects
because the ``tokenizers`` library keeps this choice as state, and encoding happens in several threads at once.

Where tiktoken gives the same ids (``engine.fast_encoder``), it encodes; it is built beside the first texts, which the
``tokenizers`` library encodes meanwhile.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as BackendTokenizer

from engine.errors import ModelError
from engine.fast_encoder import FastEncoder, build_fast_encoder
from engine.tokenizer_source import TokenizerSource, bytes_to_unicode, load_tokenizer_source

_MARKER = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORD_START = "▁"


class Tokenizer:
    """Encodes and decodes for one model. Safe to use from several threads; imports no torch."""

    def __init__(self, source: TokenizerSource) -> None:
        self._backend = source.backend
        self._backend.encode_special_tokens = False
        self.named_tokens = source.named_tokens
        """Texts of ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token``, as far as the model has them."""
        self.bos_token_id = source.bos_token_id
        self.add_bos_token = source.add_bos_token
        """A prompt starts with ``bos_token_id``; the chat tokenizer adds it unless the template has written it."""
        self.eos_token_ids = source.eos_token_ids
        """Ids that end the model's turn."""
        self.vocab_size = source.vocab_size
        self.chat_template = source.chat_template
        """Source of the model's own Jinja template, if it has one."""
        added = self._backend.get_added_tokens_decoder()
        self.control_tokens: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if self._is_control(token_id, token)
        }
        """Texts and ids of the tokens that user text must never turn into. Tags that models write into their own
        answers, such as ``<think>``, are not among them: templates look for these inside messages."""
        self._control_token_ids = frozenset(self.control_tokens.values())
        unknown = self.control_tokens.get(self.named_tokens.get("unk_token", ""))
        # ordinary text may well hold an unknown character
        may_occur = {unknown} - self.eos_token_ids - {self.bos_token_id}
        self._forbidden_token_ids = self._control_token_ids - may_occur
        self._text_backend = self._without_control_tokens(added)
        self._added_tokens = {token.content for token in added.values()}
        self._uncontrolled_tokens = self._added_tokens - self.control_tokens.keys()
        self._fast: FastEncoder | None = None
        self._fast_thread: threading.Thread | None = None
        self._fast_lock = threading.Lock()
        self._decoder: dict[str, Any] = json.loads(self._decoder_json())

    @classmethod
    def from_path(cls, path: Path) -> "Tokenizer":
        """Tokenizer of a ``.gguf`` file, a folder that holds one, or a Hugging Face folder.

        Raises ModelError naming the file when there is no tokenizer or it cannot be read.
        """
        return cls(load_tokenizer_source(path))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of ``text``, without a beginning-of-sequence token.

        With ``special`` control tokens in the text become their ids; without it they are ordinary text. A lone
        surrogate, which no encoding can carry, is encoded as U+FFFD.
        """
        fast = self._fast
        if fast is not None:
            fast_ids = fast.encode(text, self._added_tokens if special else self._uncontrolled_tokens)
            if fast_ids is not None:
                return fast_ids
        elif self._fast_thread is None:
            self._start_fast_encoder()
        if special:
            return list(_encode(self._backend, text).ids)
        ids: list[int] = _encode(self._text_backend, text).ids
        if self._forbidden_token_ids.isdisjoint(ids):
            return ids
        # A vocabulary without merges (unigram) finds control tokens as ordinary pieces. Cut inside, they are none.
        return [
            token_id for piece in self._cut_look_alikes(text) for token_id in _encode(self._text_backend, piece).ids
        ]

    def wait_for_fast_encoder(self) -> bool:
        """Build the fast encoder now, or wait until it is built; whether there is one."""
        self._start_fast_encoder()
        assert self._fast_thread is not None, "it has just been started"
        self._fast_thread.join()
        return self._fast is not None

    def split_at_control_tokens(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Cut ``text`` into ``(text, None)`` between control tokens and ``(text, id)`` for each of them, in order.

        Cuts where ``encode(text, special=True)`` sees control tokens, with the space that some of them swallow.
        """
        encoding = _encode(self._backend, text)
        position = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._control_token_ids:
                if start > position:
                    yield text[position:start], None
                yield text[start:end], token_id
                position = end
        if position < len(text):
            yield text[position:], None

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ``token_ids``; bytes that form no character are U+FFFD, ids outside the vocabulary are nothing."""
        data = b"".join(self.token_bytes(token_id, skip_special=skip_special) for token_id in token_ids)
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The UTF-8 bytes one token adds to the text: part of a character for many, nothing for control tokens."""
        if skip_special and token_id in self._control_token_ids:
            return b""
        table = self._token_bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that determines the ids: vocabulary, merges, splitting, added tokens, BOS."""
        bos = {"bos_token_id": self.bos_token_id, "add_bos_token": self.add_bos_token}
        control = sorted(self._control_token_ids)
        text = json.dumps([json.loads(self._backend.to_str()), bos, control], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    @cached_property
    def max_token_bytes(self) -> int:
        """Length of the longest token: a text of n bytes has at least ``n / max_token_bytes`` tokens."""
        return max(map(len, self._token_bytes))

    @cached_property
    def strips_leading_space(self) -> bool:
        """Decoded text loses the one space that a sentencepiece vocabulary puts before the first word."""
        for decoder in _flatten(self._decoder):
            if decoder["type"] == "Strip" and decoder.get("content") == " " and decoder.get("start", 0) > 0:
                return True
            if decoder["type"] == "Metaspace":
                return bool(decoder.get("prepend_scheme", "always") != "never")
        return False

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        table = [b""] * (max(vocab.values()) + 1)
        kinds = {decoder["type"] for decoder in _flatten(self._decoder)}
        if "ByteLevel" in kinds:
            to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
            for token, token_id in vocab.items():
                if token in added or not to_byte.keys() >= set(token):
                    table[token_id] = token.encode("utf-8")
                else:
                    table[token_id] = bytes(to_byte[character] for character in token)
        elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
            for token, token_id in vocab.items():
                byte = _BYTE_TOKEN.fullmatch(token)
                if byte and "ByteFallback" in kinds:
                    table[token_id] = bytes([int(byte[1], 16)])
                else:
                    table[token_id] = token.replace(_WORD_START, " ").encode("utf-8")
        else:
            raise ModelError(f"tokenizers with the decoder {sorted(kinds)} cannot generate text")
        return table

    def _start_fast_encoder(self) -> None:
        with self._fast_lock:
            if self._fast_thread is None:
                self._fast_thread = threading.Thread(target=self._build_fast, name="fast-encoder", daemon=True)
                self._fast_thread.start()

    def _build_fast(self) -> None:
        self._fast = build_fast_encoder(self._backend)

    def _is_control(self, token_id: int, token: AddedToken) -> bool:
        # Some vocabularies do not mark their turn markers as special; by their look they are.
        known = token_id == self.bos_token_id or token_id in self.eos_token_ids
        return bool(token.special) or known or _MARKER.fullmatch(token.content) is not None

    def _without_control_tokens(self, added: dict[int, AddedToken]) -> BackendTokenizer:
        """A second encoder over the same vocabulary that takes control tokens for ordinary text."""
        text_backend = BackendTokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            text_backend.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            text_backend.pre_tokenizer = self._backend.pre_tokenizer
        # Only the others are added: without an entry there is nothing to match. Their ids may have to be looked up
        # in the added tokens, so the order of ids is kept and checked.
        others = [
            (token_id, token) for token_id, token in sorted(added.items()) if token_id not in self._control_token_ids
        ]
        text_backend.add_tokens([token for _, token in others])
        if any(text_backend.token_to_id(token.content) != token_id for token_id, token in others):
            text_backend = BackendTokenizer.from_str(self._backend.to_str())
            text_backend.add_tokens(
                [
                    AddedToken(
                        token.content,
                        single_word=token.single_word,
                        lstrip=token.lstrip,
                        rstrip=token.rstrip,
                        normalized=token.normalized,
                        special=True,
                    )
                    for token_id, token in added.items()
                    if token_id in self._control_token_ids
                ]
            )
            text_backend.encode_special_tokens = True
        return text_backend

    def _cut_look_alikes(self, text: str) -> Iterator[str]:
        position = 0
        for match in _any_of(self.control_tokens).finditer(text):
            yield text[position : match.start() + 1]
            position = match.start() + 1
        yield text[position:]

    def _decoder_json(self) -> str:
        empty = BackendTokenizer(type(self._backend.model)())
        if self._backend.decoder is not None:
            empty.decoder = self._backend.decoder
        return json.dumps(json.loads(empty.to_str())["decoder"])


def _flatten(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is not None and decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _flatten(part)
    elif decoder is not None:
        yield decoder


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


def _encode(backend: BackendTokenizer, text: str) -> Encoding:
    try:
        return _encode_batch(backend, text)
    except TypeError:  # a lone surrogate has no UTF-8; replaced one for one, so that positions stay
        return _encode_batch(backend, _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text))


def _encode_batch(backend: BackendTokenizer, text: str) -> Encoding:
    # Only the batch call lets other threads run: encoding megabytes must not stop the gateway's event loop.
    return backend.encode_batch([text], add_special_tokens=False)[0]
