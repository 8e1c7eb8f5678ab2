"""Periods of budgets: windows in UTC that begin on the minute, the hour, at midnight and on the first of the month."""

import datetime
from typing import Literal, NamedTuple

Period = Literal["minute", "hour", "day", "month"]
PERIODS: tuple[Period, ...] = ("minute", "hour", "day", "month")

_SECONDS = {"minute": 60, "hour": 3600, "day": 86400}


class Window(NamedTuple):
    """The window of a period that holds a moment."""

    number: int
    """Counts the windows of a period; a later window has a larger one."""
    start_s: float
    """Unix time in seconds."""
    end_s: float
    """Unix time in seconds, when the next window begins."""


def window_of(period: Period, now_s: float) -> Window:
    """The window that holds Unix time ``now_s``."""
    if period != "month":
        length = _SECONDS[period]
        index = int(now_s // length)
        return Window(index, float(index * length), float((index + 1) * length))
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    start = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    # 32 days after the first of a month lie in the next one, whatever its length.
    end = (start + datetime.timedelta(days=32)).replace(day=1)
    return Window(start.year * 12 + start.month, start.timestamp(), end.timestamp())
