"""Turns generated ids into text step by step: complete characters only, and nothing of a stop string.

Two things are held back. Bytes that do not end on a character border wait in the UTF-8 decoder. Text that may be the
beginning of a stop string waits until the next character decides. With ``stop=("\\nUser",)``::

    ids for      "Fine."  "\\n"    "Use"   " it"
    returned     "Fine."  ""      ""      "\\nUse it"

With ``min_tokens`` the text of the tokens before cannot be part of a stop string.

Which tokens the returned text covers is counted too, so that what is told about tokens never runs ahead of their text.
One matching automaton per stop string (Knuth, Morris, Pratt) makes the whole output linear in its length, whatever the
stop strings are and wherever the tokens cut them.
"""

import codecs
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Detokenises one sequence. What ``append`` and ``flush`` return adds up to ``tokenizer.decode`` of all ids, cut
    before the first stop string.

    The first stop string to be complete, character by character, wins; of several complete at once, the longest.
    The result therefore does not depend on how the text was cut into tokens or steps.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        visible_tokens: tuple[str, ...] = (),
    ) -> None:
        """``visible_tokens`` are texts of control tokens that are written out; all others are no text."""
        self._tokenizer = tokenizer
        controls = tokenizer.control_tokens
        self._visible = frozenset(controls[text] for text in visible_tokens if text in controls)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_StopMatcher(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._held = ""
        self._is_at_start = tokenizer.strips_leading_space
        self._num_exempt_tokens = min_tokens if stop else 0
        self._num_characters = 0
        self._num_released = 0
        self._unsettled: deque[_Span] = deque()
        self.num_settled_tokens = 0
        """Tokens, of those taken in, whose text has been returned as far as it ever will be. A token of the stop
        string is none; one that the stop string begins inside of is."""
        self.stop_reason: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        """A stop string is complete; there will be no more text."""
        return self.stop_reason is not None

    def append(self, token_ids: Iterable[int]) -> str:
        """Take ids in and return the text that is now certain; empty once ``stopped``."""
        certain = ""
        for token_id in token_ids:
            if self.stopped:
                break
            data = self._tokenizer.token_bytes(token_id, skip_special=token_id not in self._visible)
            if self._is_at_start and data:
                data = data.removeprefix(b" ")
                self._is_at_start = False
            text = self._decoder.decode(data)
            start = self._num_characters
            self._num_characters += len(text)
            self._unsettled.append(_Span(start, self._num_characters))
            if self._num_exempt_tokens > 0:
                self._num_exempt_tokens -= 1
                certain += text
                self._num_released += len(text)
            else:
                certain += self._release(text)
        self._settle()
        return certain

    def flush(self) -> str:
        """The rest at the end of the output: a possible stop prefix that stayed one.

        The bytes of a character that the last token cut off are left out; bytes that never were one are U+FFFD."""
        if self.stopped:
            return ""
        text, self._held = self._held, ""
        self._num_released += len(text)
        self.num_settled_tokens += len(self._unsettled)
        self._unsettled.clear()
        return text

    def _settle(self) -> None:
        """Count the leading tokens whose text is out; of a stopped output also the one that the stop string cut."""
        while self._unsettled:
            start, end = self._unsettled[0]
            is_cut = self.stopped and start < self._num_released
            if end > self._num_released and not is_cut:
                break
            self._unsettled.popleft()
            self.num_settled_tokens += 1

    def _release(self, text: str) -> str:
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            complete = [matcher for matcher in self._matchers if matcher.is_complete_after(character)]
            if complete:
                self.stop_reason = complete[0].text  # longest first
                self._held = ""
                certain = pending[: position - len(complete[0].text)]
                self._num_released += len(certain)
                return certain
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        num_certain = len(pending) - num_held
        self._held = pending[num_certain:]
        self._num_released += num_certain
        return pending[:num_certain]


class _Span(NamedTuple):
    """Characters that one token completes, counted from the start of the text."""

    start: int
    end: int


class _StopMatcher:
    """How many characters at the end of the text so far are a prefix of ``text``."""

    __slots__ = ("_fallback", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # _fallback[n]: the longest proper prefix of text[:n] that is also its suffix
        self._fallback = [0, 0]
        for character in text[1:]:
            length = self._fallback[-1]
            while length and text[length] != character:
                length = self._fallback[length]
            self._fallback.append(length + 1 if text[length] == character else 0)

    def is_complete_after(self, character: str) -> bool:
        """Advance by one character."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._fallback[self.num_matched]
        if self.text[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.text)
