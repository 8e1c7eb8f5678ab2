"""The format of Hermes and Qwen, and of the text that ``engine.chat_messages`` writes for templates without tools.

``<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>``, once for every call, behind any text.
"""

from engine.tool_parsers.base import ToolCall
from engine.tool_parsers.marked import MarkedToolParser


class HermesToolParser(MarkedToolParser):
    """One object inside each pair of tags."""

    begin = "<tool_call>"
    end = "</tool_call>"
    markers = (begin, end)

    def _start_of_value(self, text: str) -> int | None:
        value = text.lstrip()
        if not value:
            return None
        return len(text) - len(value) if value[0] == "{" else -1

    def _read(self, head: str, value: str) -> list[ToolCall] | None:
        return self._calls_in(value)
