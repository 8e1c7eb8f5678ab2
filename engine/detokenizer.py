"""Turns generated ids into text step by step: complete characters only, and nothing of a stop string.

Two things are held back. Bytes that do not end on a character border wait in the UTF-8 decoder. Text that may be the
beginning of a stop string waits until the next character decides. With ``stop=("\\nUser",)``::

    ids for      "Fine."  "\\n"    "Use"   " it"
    returned     "Fine."  ""      ""      "\\nUse it"

One matching automaton per stop string (Knuth, Morris, Pratt) makes the whole output linear in its length, whatever the
stop strings are and wherever the tokens cut them.
"""

import codecs
from collections.abc import Iterable

from engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Detokenises one sequence. What ``append`` and ``flush`` return adds up to ``tokenizer.decode`` of all ids, cut
    before the first stop string.

    The first stop string to be complete, character by character, wins; of several complete at once, the longest.
    The result therefore does not depend on how the text was cut into tokens or steps.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_StopMatcher(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._held = ""
        self._is_at_start = tokenizer.strips_leading_space
        self.stop_reason: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        """A stop string is complete; there will be no more text."""
        return self.stop_reason is not None

    def append(self, token_ids: Iterable[int]) -> str:
        """Take ids in and return the text that is now certain; empty once ``stopped``."""
        if self.stopped:
            return ""
        data = b"".join(map(self._tokenizer.token_bytes, token_ids))
        if self._is_at_start and data:
            data = data.removeprefix(b" ")
            self._is_at_start = False
        return self._release(self._decoder.decode(data))

    def flush(self) -> str:
        """The rest at the end of the output: a possible stop prefix that stayed one.

        The bytes of a character that the last token cut off are left out; bytes that never were one are U+FFFD."""
        if self.stopped:
            return ""
        text, self._held = self._held, ""
        return text

    def _release(self, text: str) -> str:
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            complete = [matcher for matcher in self._matchers if matcher.is_complete_after(character)]
            if complete:
                self.stop_reason = complete[0].text  # longest first
                self._held = ""
                return pending[: position - len(complete[0].text)]
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        certain = len(pending) - num_held
        self._held = pending[certain:]
        return pending[:certain]


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
