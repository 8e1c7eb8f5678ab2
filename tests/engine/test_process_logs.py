"""What an engine's process writes of what it logs."""

import io
import json
import logging
from datetime import datetime

import pytest

from engine.process_logs import LogStyle, ProcessFormatter

SECRET = "heron"


def written(style: LogStyle) -> list[str]:
    stream = io.StringIO()
    logger = logging.getLogger("tests.engine_process")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(ProcessFormatter(style))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel("INFO")
    try:
        logger.info("ready after %.1f s", 2.5)
        try:
            raise KeyError(SECRET)
        except KeyError:
            logger.exception("the engine %s", "broke")
    finally:
        logger.removeHandler(handler)
    return stream.getvalue().splitlines()


def test_json_lines_have_the_fields_of_the_gateways_own_and_no_words_of_an_exception() -> None:
    ready, broke = map(json.loads, written(LogStyle(format="json")))
    assert (ready["event"], ready["level"], ready["logger"]) == ("ready after 2.5 s", "info", "tests.engine_process")
    assert ready["timestamp"].endswith("Z")
    assert datetime.fromisoformat(ready["timestamp"]).tzinfo is not None
    assert (broke["event"], broke["level"]) == ("the engine broke", "error")
    assert broke["exception"].startswith("KeyError at test_process_logs.py:")
    assert SECRET not in str(broke)


@pytest.mark.parametrize("style", ["json", "console"])
def test_the_words_of_an_exception_are_there_where_they_are_wanted(style: str) -> None:
    lines = written(LogStyle(format=style, exception_text=True))  # type: ignore[arg-type]
    assert SECRET in "\n".join(lines)
    assert len(lines) == (2 if style == "json" else 6)


def test_a_line_for_people_names_where_an_exception_came_from() -> None:
    lines = written(LogStyle())
    assert lines[0].endswith(" INFO tests.engine_process: ready after 2.5 s")
    assert lines[2].startswith("KeyError at test_process_logs.py:")
    assert SECRET not in "".join(lines)
