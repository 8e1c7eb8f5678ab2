"""How an engine's process logs: on standard error, in the format of whoever started it.

The words of an unexpected exception may quote what it was computing; unless they are wanted, the log has its kind and
where it came from:

    {"event":"the engine broke","level":"error","logger":"engine.core_process","timestamp":"2026-01-31T12:00:00Z",
     "exception":"KeyError at scheduler.py:88 in schedule < llm_engine.py:120 in step"}
"""

import logging
import traceback
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Literal

import msgspec

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_FRAMES = 30


class LogStyle(msgspec.Struct, frozen=True, kw_only=True):
    """What a process writes of what it logs."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "console"
    exception_text: bool = False
    """Whole tracebacks with the words of exceptions."""


class ProcessFormatter(logging.Formatter):
    """A record as one line; a traceback in ``console`` format with ``exception_text`` follows it."""

    def __init__(self, style: LogStyle) -> None:
        super().__init__(TEXT_FORMAT)
        self._logs = style

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        if self._logs.format == "console":
            record.exc_text = None  # another handler may have left its own words there
            return super().format(record)
        fields = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = self._exception(record.exc_info[1])
        text = {name: value.encode("utf-8", "replace").decode() for name, value in fields.items()}
        return msgspec.json.encode(text).decode()

    def formatException(self, ei: object) -> str:  # logging's name
        """What follows the line of a record with an exception."""
        error = ei[1] if isinstance(ei, tuple) else None
        return self._exception(error) if isinstance(error, BaseException) else ""

    def _exception(self, error: BaseException) -> str:
        if self._logs.exception_text:
            return "".join(traceback.format_exception(error)).rstrip()
        return place_of(error, num_parts=1)


def place_of(error: BaseException, *, num_parts: int) -> str:
    """An exception's kind and where it came from, innermost first; ``num_parts`` of each file's path are told."""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    places = [
        f"{'/'.join(PurePath(frame.filename).parts[-num_parts:])}:{frame.lineno} in {frame.name}"
        for frame in reversed(frames)
    ]
    return f"{type(error).__name__} at {' < '.join(places)}" if places else type(error).__name__


def configure_process_logs(style: LogStyle) -> None:
    """Sends all records of this process to standard error. Called once, at its start."""
    handler = logging.StreamHandler()
    handler.setFormatter(ProcessFormatter(style))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(style.level.upper())
