"""Structured logs on standard error: one JSON object a line, or coloured text for people."""

import logging
import sys
from typing import TextIO

import structlog

from app.settings import LoggingSettings


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
    exceptions: list[structlog.types.Processor] = [structlog.processors.format_exc_info] if is_json else []
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *exceptions, renderer],
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
    for chatty in ("httpx", "httpcore", "sentence_transformers", "urllib3"):
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
