"""Tool calls in the text of an answer: one parser for each format that models write, by vLLM's names."""

import re
from typing import Literal

from engine.tool_parsers.base import ToolCall, ToolParser
from engine.tool_parsers.hermes import HermesToolParser
from engine.tool_parsers.llama import Llama3JsonToolParser
from engine.tool_parsers.mistral import MistralToolParser

ToolParserName = Literal["hermes", "llama3_json", "mistral"]

__all__ = ("ToolCall", "ToolParser", "ToolParserName", "choose_tool_parser", "tool_parser_class")


def choose_tool_parser(template: str) -> ToolParserName:
    """The format that a chat template teaches its model; what says nothing of one gets the format of Hermes.

    That is also what tools are described in where a template knows none (``engine.chat_messages``).
    """
    if re.search(r"\btools\b", template) is None or "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template or "[AVAILABLE_TOOLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3_json"
    return "hermes"


def tool_parser_class(name: ToolParserName) -> type[ToolParser]:
    """The parser of a format."""
    return {"hermes": HermesToolParser, "llama3_json": Llama3JsonToolParser, "mistral": MistralToolParser}[name]
