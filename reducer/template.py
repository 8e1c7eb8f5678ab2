"""Template: stable text first, then history, then one user message that holds the documents and the question.

    <documents>
    [1] Title of the first document sent
    its text
    [4] the text of a document without a title
    </documents>

    the question, byte for byte

A label names the place of the document in the request, so ``[4]`` means the fourth document sent whatever was dropped
(under the ``cache`` order: its place in the prompt). A passage that stands for others keeps one label, its own.
Text inside a passage that would open or close a block or forge a label at a line start gets one backslash; ``unescape``
takes it away again, so the original is never in doubt.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reducer.errors import InvalidPromptError
from reducer.prompt import WireMessage
from reducer.stage import Selected, Span

OPENING = "<documents>\n"
CLOSING = "</documents>\n\n"
GAP = " … "
"""Stands between two kept spans of one passage, so that a cut is visible."""

_UNSEEN = (
    r"\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    r"\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff"
)
"""Characters that a reader does not see: a label behind a soft hyphen or inside a direction mark is still a label."""
_LINE_START = rf"(?:^|(?<=[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]))(?:[^\S\n]|[{_UNSEEN}])*+"
_BLANK = rf"[\s{_UNSEEN}]*+"
_LABEL = rf"[\[［]{_BLANK}\d++(?:[{_UNSEEN}]*+\d++)*+{_BLANK}[\]］]"
_NAME = "(?:" + "|".join(rf"[{_UNSEEN}]*+".join(name) for name in ("documents", "history", "recall")) + ")"
_TAG_REST = rf"{_BLANK}[/／]?{_BLANK}{_NAME}\b"
_FORGED = re.compile(
    rf"(?P<label>{_LINE_START}\\*+(?={_LABEL}))|(?P<tag>[<＜﹤]{_BLANK}\\*+(?={_TAG_REST}))", re.IGNORECASE
)
_ESCAPED = re.compile(rf"({_LINE_START})\\(?=\\*+{_LABEL})|([<＜﹤]{_BLANK})\\(?=\\*+{_TAG_REST})", re.IGNORECASE)
_OPENERS = re.compile("[\\[［<＜﹤]")


def escape(text: str) -> str:
    """``text`` with a backslash before everything that reads as a label at a line start or as the block's tag."""
    if _OPENERS.search(text) is None:
        return text
    return _FORGED.sub(lambda match: match.group() + "\\", text)


def unescape(text: str) -> str:
    """The inverse of ``escape``."""
    return _ESCAPED.sub(lambda match: match.group(1) or match.group(2) or "", text)


def render_heading(label: str, title: str | None) -> str:
    """What stands before a passage's text: ``[1] Title`` and a line break, or ``[1]`` and a space."""
    heading = " ".join(title.split()) if title else ""
    return f"{label} {escape(heading)}\n" if heading else f"{label} "


def render_passage(text: str, spans: Sequence[Span]) -> str:
    """The kept text of a passage, escaped; a cut inside it shows as ``GAP``."""
    return escape(GAP.join(text[span.start : span.end].strip() for span in spans))


def render_documents(arranged: Sequence[Selected]) -> str:
    """The documents block with the passages in the order given, or nothing when no passage is left."""
    if not arranged:
        return ""
    entries = [
        render_heading(item.candidate.label, item.candidate.passage.title)
        + render_passage(item.candidate.passage.text, item.spans)
        for item in arranged
    ]
    return OPENING + "\n".join(entries) + "\n" + CLOSING


def prepend_documents(message: WireMessage, block: str) -> dict[str, Any]:
    """The user message with the documents block in front of its text; every other field stays.

    Raises InvalidPromptError for a content that is neither text nor a list of parts.
    """
    content = message.get("content")
    if not block:
        return dict(message)
    if content is None or isinstance(content, str):
        return {**message, "content": block + (content or "")}
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": block}, *content]}
    raise InvalidPromptError(f"content of the user message must be text or a list of parts, got {content!r}")


def message_text(message: Mapping[str, Any]) -> str:
    """All text of a message: its content or the text parts of it, in order, one line each."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        return "\n".join(text for text in texts if isinstance(text, str))
    return ""
