"""Exceptions cross the border between the processes as what they were."""

import pytest

from engine.errors import (
    AdmissionError,
    EngineError,
    ModelError,
    OutputTooLongError,
    PromptTooLongError,
    QueueFullError,
)
from engine.wire import to_exception, to_wire_error


@pytest.mark.parametrize(
    "error",
    [
        QueueFullError(17, 2.5),
        AdmissionError("3 tokens wait", reason="tenant_queue", retry_after_s=2.5),
        AdmissionError("too late", reason="deadline", retry_after_s=7.0),
        PromptTooLongError(9000, 8192),
        PromptTooLongError(9000, 100, is_input_limit=True),
        OutputTooLongError(50, 5),
        ModelError("weights.gguf is cut off"),
        ValueError("token id 999 is outside the vocabulary"),
        EngineError("it is lost"),
    ],
)
def test_error_is_the_same_behind_the_border(error: Exception) -> None:
    back = to_exception(to_wire_error(error))
    if type(error) is not EngineError:  # its class is told in the text
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert vars(back) == vars(error)
    assert str(error) in str(back)
