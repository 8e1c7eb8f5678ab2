"""The format of Llama 3: an answer that is nothing but calls, as JSON objects with ``;`` or ``,`` between them.

``{"name": "weather", "parameters": {"city": "Łódź"}}``, after ``<|python_tag|>`` or without it. An answer that begins
with anything else is text to its end, and so is a JSON object that is no call.
"""

from collections.abc import Iterable

from engine.tool_parsers.base import JsonScanner, ToolCall, ToolParser

_PYTHON_TAG = "<|python_tag|>"


class Llama3JsonToolParser(ToolParser):
    """Objects from the first character on."""

    markers = (_PYTHON_TAG,)

    def __init__(self, tool_names: Iterable[str]) -> None:
        super().__init__(tool_names)
        self._scanner = JsonScanner()
        self._is_text = False

    def _parse(self) -> Iterable[str | ToolCall]:
        while not self._is_text:
            start = self._start_of_value()
            end = None if start is None else self._scanner.end_of_value(self._buffer[start:])
            if start is None or end is None:
                if not self._is_text and not self._is_at_end:
                    return
                break
            value = self._buffer[start : start + end]
            calls = self._calls_in(value, needs_arguments=True)
            if calls is None:
                break
            yield from calls
            self._buffer = self._buffer[start + end :]
            self._scanner = JsonScanner()
        self._is_text = True
        text, self._buffer = self._buffer, ""
        yield text

    def _start_of_value(self) -> int | None:
        """Where the next value starts, ``None`` where it has not come; notes where there will be none."""
        rest = self._buffer.lstrip()
        if self.num_calls and rest[:1] in (";", ","):
            rest = rest[1:].lstrip()
        if rest.startswith(_PYTHON_TAG):
            rest = rest.removeprefix(_PYTHON_TAG).lstrip()
        elif _PYTHON_TAG.startswith(rest):
            return None
        if rest and rest[0] not in "{[":
            self._is_text = True
        return len(self._buffer) - len(rest) if rest and not self._is_text else None
