"""Volatile fields: what changes from request to request in text that should stay the same, and where it can go.

A clock in the first line of the system text makes every block after it new. Fields are found by their label or shape:

    Current date: 2026-11-30            date, a line of its own: can move
    The current time is 10:33.          clock, a sentence of its own: can move
    Prices hold from 2026-01-01.        no field: nothing says that the date is today's
    You serve user 7f0c…-…, be brief.   uuid inside a sentence: reported, never cut out

Moved is only a whole line or sentence that holds nothing but its label and its value, so what remains is the text
without that sentence. The moved line keeps its words.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reducer.template import message_text

VolatileKind = Literal["clock", "date", "uuid", "request_id", "user_name", "counter"]

_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_ZONE = r"(?: ?(?:Z|UTC|GMT|CET|CEST|EST|PST|[+-]\d{2}:?\d{2}))?"
_TIME = rf"\d{{1,2}}:\d{{2}}(?::\d{{2}})?(?:\.\d{{1,6}})?(?: ?[ap]\.?m\.?)?{_ZONE}"
_DAYS = """
    monday tuesday wednesday thursday friday saturday sunday mon tue wed thu fri sat sun
    montag dienstag mittwoch donnerstag freitag samstag sonntag lunes martes miércoles jueves viernes sábado domingo
"""
_DAY = f"(?:{'|'.join(_DAYS.split())}),?"
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mär|mai|okt|dez|ene|abr|ago|dic)[a-zä]*\.?"
_DATE = (
    rf"(?:{_DAY} )?(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}"
    rf"|\d{{1,2}}(?:st|nd|rd|th|\.)? (?:of |de )?{_MONTH},?(?: de)? \d{{4}}"
    rf"|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}"
    r"|\d{4} ?年 ?\d{1,2} ?月 ?\d{1,2} ?日(?: ?星期[一二三四五六日天])?)"
)
_STAMP = rf"{_DATE}[T ,]+(?:at )?{_TIME}"
_NOW = (
    r"(?:the )?(?:current|today'?s|present|local|server|system|aktuelle[rs]?|heutige[rs]?|actual"
    r"|当前|现在|今天的?)[ _]?"
)
_CLOCK_LABEL = (
    rf"{_NOW}(?:date(?: and | ?& ?|[ /_-]?)time|time|timestamp|uhrzeit|zeit|hora|时间)|timestamp|it is now|现在时间"
)
_DATE_LABEL = rf"{_NOW}(?:date|day|datum|fecha|日期)|today|heute|hoy|今天"
_ID_LABEL = (
    r"(?:request|trace|session|conversation|correlation|message|thread|chat|run|call)[ _-]?id"
    r"|请求(?:id|编号)|会话(?:id|编号)"
)
_NAME_LABEL = (
    r"(?:the )?(?:current |logged[- ]in )?(?:user|customer)(?:'s)?[ _-]?name|(?:the )?(?:current|logged[- ]in) user"
    r"|name of the user|benutzername|nombre del usuario|用户(?:名|姓名)"
)
_COUNTER_LABEL = (
    r"(?:turn|message|request|attempt|iteration)[ _-](?:number|no\.?|count)"
    r"|(?:remaining|used) (?:tokens|turns|messages|credits)|(?:tokens|turns|messages|credits) (?:left|remaining|used)"
    r"|消息数|剩余(?:次数|额度)"
)
_COUNT = r"#?\d[\d,]*(?: ?(?:of|/|von|de) ?\d+)?"
_COLON = r" ?[:：=] ?"
_JOIN = rf"(?:{_COLON}| is | ist | es |是 ?|为 ?)"
_SHAPES: tuple[tuple[VolatileKind, str, str, str], ...] = (
    ("clock", _CLOCK_LABEL, rf"(?:{_JOIN}| )", rf"(?:{_STAMP}|{_TIME}|{_DATE}|\d{{10}}(?:\d{{3}})?)"),
    ("date", _DATE_LABEL, _JOIN, rf"(?:{_STAMP}|{_DATE}|{_DAY})"),
    ("request_id", _ID_LABEL, _COLON, rf"(?:{_UUID}|#?[\w-]{{4,64}})"),
    ("user_name", _NAME_LABEL, _JOIN, r"[^\n.;:]{1,60}"),
    ("counter", _COUNTER_LABEL, _COLON, _COUNT),
)
_WHOLE = [
    (kind, re.compile(rf"(?:{label}){joint}(?:{value}) ?[.。]?", re.IGNORECASE))
    for kind, label, joint, value in _SHAPES
]
_INSIDE: tuple[tuple[VolatileKind, re.Pattern[str]], ...] = (
    ("uuid", re.compile(rf"\b{_UUID}\b")),
    ("clock", re.compile(rf"\b{_STAMP}", re.IGNORECASE)),
    *((kind, re.compile(rf"(?:{label}){joint}(?:{value})", re.IGNORECASE)) for kind, label, joint, value in _SHAPES),
)
_SENTENCE_END = re.compile(r"(?<=[.!?])[ \t]+|(?<=[。！？])[ \t]*")
MAX_UNIT_CHARS = 160
"""A longer sentence holds more than a field."""
MAX_TEXT_CHARS = 200_000
"""Only the beginning of a longer system text is searched."""


@dataclass(frozen=True, slots=True)
class VolatileField:
    """One field in the text of one message; offsets are ``[start, end)`` of what is volatile or, if it can move, of the
    whole line or sentence."""

    kind: VolatileKind
    message: int
    """Index of the message as received."""
    start: int
    end: int
    can_move: bool


@dataclass(frozen=True, slots=True)
class Moved:
    """System messages without their movable fields, and the lines that were taken out, one each."""

    messages: tuple[Mapping[str, Any], ...]
    lines: tuple[str, ...]
    fields: tuple[VolatileField, ...]


def find_volatile(messages: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[VolatileField]:
    """Volatile fields in the text of the messages ``indices``, in order."""
    found: list[VolatileField] = []
    for index in indices:
        text = message_text(messages[index])[:MAX_TEXT_CHARS]
        whole = [] if text.count("```") >= 2 else _whole_units(text, index)
        found.extend(whole)
        taken = [(field.start, field.end) for field in whole]
        for kind, pattern in _INSIDE:
            for match in pattern.finditer(text):
                if all(match.end() <= start or match.start() >= end for start, end in taken):
                    found.append(VolatileField(kind, index, match.start(), match.end(), False))
                    taken.append(match.span())
    return sorted(found, key=lambda field: (field.message, field.start))


def move_volatile(messages: Sequence[Mapping[str, Any]], fields: Sequence[VolatileField]) -> Moved:
    """Take the movable fields out of plain-text messages; a message that would be left without text keeps its own."""
    changed = list(messages)
    lines: list[str] = []
    moved: list[VolatileField] = []
    for index in sorted({field.message for field in fields}):
        content = messages[index].get("content")
        movable = [field for field in fields if field.message == index and field.can_move]
        if not isinstance(content, str) or not movable:
            continue
        remainder = content
        for field in reversed(movable):
            remainder = _cut(remainder, field.start, field.end)
        if not any(map(str.isalnum, remainder)):
            continue
        changed[index] = {**messages[index], "content": remainder}
        lines.extend(content[field.start : field.end].strip(" -*•") for field in movable)
        moved.extend(movable)
    return Moved(tuple(changed), tuple(lines), tuple(moved))


def _whole_units(text: str, index: int) -> list[VolatileField]:
    """Lines and sentences that are a field and nothing else."""
    found: list[VolatileField] = []
    position = 0
    for line in text.split("\n"):
        ends = [match.span() for match in _SENTENCE_END.finditer(line)] if len(line) > 3 else []
        start = 0
        for end, after in [*ends, (len(line), len(line))]:
            unit = line[start:end].strip().lstrip("-*• ")
            if 4 <= len(unit) <= MAX_UNIT_CHARS:
                begin = position + line.index(unit, start)
                for kind, pattern in _WHOLE:
                    if pattern.fullmatch(unit) and _stands_alone(text, begin, begin + len(unit)):
                        found.append(VolatileField(kind, index, begin, begin + len(unit), True))
                        break
            start = after
        position += len(line) + 1
    return found


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Whether nothing around a unit leans on it: a list that it introduces, a sentence that refers to it, a table."""
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line = text[line_start : len(text) if line_end < 0 else line_end]
    before, after = text[line_start:start], text[end : line_start + len(line)]
    if "|" in line or "{" in line or "<" in line:
        return False
    # In the middle of a line the neighbours must be whole sentences.
    is_before_whole = not before.strip(" -*•") or before.rstrip()[-1] in ".!?。！？"
    is_after_whole = not after.strip() or text[end - 1] in ".!?。！？"
    follows = re.match(r"\s*(?:it|this|that|these|use it|dies|das|esto|它|这)\b", text[end:], re.IGNORECASE)
    return is_before_whole and is_after_whole and follows is None


def _cut(text: str, start: int, end: int) -> str:
    """``text`` without ``[start, end)`` and without the white space that only this part needed."""
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    if not text[line_start:start].strip(" \t-*•") and not text[end:line_end].strip():
        if line_end < len(text):
            return text[:line_start] + text[line_end + 1 :]
        return text[:line_start].removesuffix("\n")
    after = text[end:]
    return text[:start] + after.lstrip(" ") if text[:start].endswith((" ", "\n")) or not start else text[:start] + after
