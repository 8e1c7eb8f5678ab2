"""JSON mode: which tokens keep an output on the way to a JSON document that follows a schema.

The library is llguidance: an Earley parser over a lexer of derivatives, written in Rust, tens of microseconds for the
mask of a whole vocabulary. It sees the served model's tokenizer as bytes per id, so it works with any that this engine
loads. It is imported when the first schema comes.

Whitespace between tokens of the JSON is allowed, but not without end: small models like to go on with spaces.
"""

import functools
import importlib.util
import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import GrammarError
from engine.tokenizer import Tokenizer

MAX_SCHEMA_BYTES = 64 * 1024
"""Longest schema, as compact JSON: what compiles in a few milliseconds, while all streams wait."""
ANY_OBJECT = '{"type":"object"}'
"""The schema of ``response_format`` ``json_object``."""

_OPTIONS = {"whitespace_pattern": r"[ \n\t]{1,20}"}
_MAX_CACHED = 64
_MAX_PREFIX_TOKENS = 4
_MISSING = "JSON output needs the package llguidance, which is not installed"


def check_schema(schema: str) -> None:
    """Raises GrammarError for a schema that cannot be followed, with the reason; needs no tokenizer."""
    _check_error(_library().LLMatcher.validate_grammar(_grammar_of(schema), limits=_limits()))


class JsonMatcher:
    """Follows one output through its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.num_accepted = 0
        """Output tokens taken in."""

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        """Write the allowed tokens, one bit each, lowest first. After the end these are end-of-sequence ids alone.

        Args:
            mask: (ceil(vocab_size / 32),), contiguous.

        Raises:
            GrammarError: the grammar has become too complex to follow.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _check_error(self._matcher.get_error())

    def accept(self, token_ids: list[int]) -> None:
        """Take in chosen tokens. Raises GrammarError for one that the mask did not allow."""
        for token_id in token_ids:
            if not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
                _check_error(self._matcher.get_error())
        self.num_accepted += len(token_ids)


class GrammarCompiler:
    """Makes matchers for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self.vocab_size = tokenizer.vocab_size
        """Ids that a mask covers; logits beyond them are of no token."""

    def compile(self, schema: str) -> JsonMatcher:
        """A matcher at the start of a document that follows ``schema``, a JSON schema as JSON.

        Raises:
            GrammarError: the schema cannot be followed, or there is no library for it.
        """
        with self._lock:
            matcher = self._compiled.get(schema)
            if matcher is None:
                library = _library()
                matcher = library.LLMatcher(self._ll_tokenizer, _grammar_of(schema), log_level=0, limits=_limits())
                _check_error(matcher.get_error())
                self._compiled[schema] = matcher
                if len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(schema)
            return JsonMatcher(matcher.deep_copy())

    def warm_up(self) -> None:
        """Prepare the vocabulary, which takes a few tenths of a second; no effect without the library."""
        if importlib.util.find_spec("llguidance") is not None:
            with self._lock:
                _ = self._ll_tokenizer

    @functools.cached_property
    def _ll_tokenizer(self) -> Any:
        library = _library()
        wrapper = library.TokenizerWrapper(_Vocabulary(self._tokenizer))
        return library.LLTokenizer(wrapper, eos_token=sorted(self._tokenizer.eos_token_ids))


class _Vocabulary:
    """The tokenizer in the form that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, so JSON output would never end")
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.control_tokens.values())
        self.tokens = [tokenizer.token_bytes(token_id, skip_special=False) for token_id in range(tokenizer.vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens that add up to ``text``, where the model would be forced to write it."""
        string = text if isinstance(text, str) else text.decode("utf-8", "replace")
        data = string.encode("utf-8", "replace")
        token_ids = self._tokenizer.encode(string)
        if self._bytes_of(token_ids) == data:
            return token_ids
        # Some vocabularies put a space before a text. Behind a line break of its own, it has none.
        token_ids = self._tokenizer.encode(f"\n{string}")
        for start in range(1, min(len(token_ids), _MAX_PREFIX_TOKENS) + 1):
            if self._bytes_of(token_ids[start:]) == data:
                return token_ids[start:]
        return self._longest_pieces(data)

    def _bytes_of(self, token_ids: list[int]) -> bytes:
        return b"".join(self.tokens[token_id] for token_id in token_ids)

    def _longest_pieces(self, data: bytes) -> list[int]:
        special = set(self.special_token_ids)
        by_bytes = {piece: token_id for token_id, piece in enumerate(self.tokens) if piece and token_id not in special}
        longest = max(map(len, by_bytes))
        token_ids, position = [], 0
        while position < len(data):
            pieces = (data[position : position + length] for length in range(longest, 0, -1))
            piece = next((piece for piece in pieces if piece in by_bytes), None)
            if piece is not None:  # else the vocabulary cannot write it, and the sequence will fail there
                token_ids.append(by_bytes[piece])
            position += len(piece or b"?")
        return token_ids


@functools.cache
def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GrammarError(_MISSING) from error
    return llguidance


@functools.cache
def _limits() -> Any:
    return _library().LLParserLimits(verbose_errors=False)


def _grammar_of(schema: str) -> str:
    num_bytes = len(schema.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise GrammarError(f"the JSON schema has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are followed")
    try:
        value = json.loads(schema)
        # A schema may be true or false as well; the library reads objects.
        text = schema if isinstance(value, dict) else "{}" if value is True else '{"not":{}}'
        return str(_library().LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema cannot be read: {error}") from error


def _check_error(message: str) -> None:
    if message and not message.startswith("WARNING"):
        raise GrammarError(f"the JSON schema cannot be followed: {' '.join(message.split())[:500]}")
