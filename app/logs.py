"""Structured logs on standard error: one JSON object a line, or text for people. Ids and numbers, no text of prompts.

What our own code logs is words of its own. What others wrote may quote a prompt: the message of an exception that
nobody expected, and asyncio's account of a task that failed. Of these the log has the kind and the place in the code:

    KeyError at app/relay.py:102 in read_answer < app/controllers/chat.py:49 in whole_answer < …
"""

import logging
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import structlog

from app.settings import LoggingSettings
from engine.process_logs import place_of

NUM_PATH_PARTS = 3
MAX_CHAIN = 5
CHATTY = (
    "alembic.runtime.plugins",
    "httpx",
    "httpcore",
    "sentence_transformers",
    "urllib3",
    "aiohttp",
    "opentelemetry",
)


def configure_logging(settings: LoggingSettings, stream: TextIO | None = None) -> None:
    """Sends structlog's and the standard library's records to ``stream`` (standard error) in one format.

    Called once by the command line; a library that embeds the gateway configures its own.
    """
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    is_json = settings.format == "json"
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer() if is_json else structlog.dev.ConsoleRenderer(colors=False)
    )
    exceptions: structlog.types.Processor = tell_place
    if settings.exception_text:
        exceptions = structlog.processors.format_exc_info
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *([] if settings.exception_text else [shorten_asyncio]),
            exceptions,
            renderer,
        ],
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel("WARNING")
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def tell_place(_: Any, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    """Replaces an exception by its kind and where it came from, innermost first, its causes behind it."""
    given = event.pop("exc_info", None)
    if isinstance(given, tuple):
        given = given[1]
    error = sys.exception() if given is True else given
    if isinstance(error, BaseException):
        event["exception"] = " from ".join(place_of(item, num_parts=NUM_PATH_PARTS) for item in _chain(error))
    return event


def shorten_asyncio(_: Any, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    """Keeps the first line of what asyncio logs; below it stands the failed task with the words of its exception."""
    if event.get("logger") == "asyncio":
        event["event"] = str(event.get("event", "")).partition("\n")[0]
    return event


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if current is None:
            return
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
