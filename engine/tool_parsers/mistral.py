"""The formats of Mistral, an array of all calls or, in newer models, name and arguments of each behind its own marker.

``[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Łódź"}}]``
``[TOOL_CALLS]weather[ARGS]{"city": "Łódź"}[TOOL_CALLS]clock[ARGS]{}``, where ``[ARGS]`` may be missing.
"""

import re
import secrets
import string

from engine.tool_parsers.base import ToolCall
from engine.tool_parsers.marked import MarkedToolParser

_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*")
_MAYBE_NAME = re.compile(r"\s*[\w.-]*\s*(?:\[[A-Z_]*\]?[^{\n]*)?")
_CALL_ID_CHARACTERS = string.ascii_letters + string.digits


class MistralToolParser(MarkedToolParser):
    """An array, or a name and an object."""

    begin = "[TOOL_CALLS]"
    markers = (begin, "[ARGS]", "[CALL_ID]")

    @staticmethod
    def make_call_id() -> str:
        """Nine letters and digits: the templates refuse any other."""
        return "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(9))

    def _start_of_value(self, text: str) -> int | None:
        value = text.lstrip()
        if value.startswith("["):
            return len(text) - len(value)
        name = _NAME.match(text)
        if name is not None and text[name.end() :].startswith("{"):
            return name.end()
        return None if _MAYBE_NAME.fullmatch(text) is not None else -1

    def _read(self, head: str, value: str) -> list[ToolCall] | None:
        name = _NAME.fullmatch(head)
        if name is None:
            return self._calls_in(value) if value.startswith("[") else None
        call = self._call(name[1], value)
        return None if call is None else [call]
