"""A program in an environment of its own that answers each line on its standard input by a line of JSON."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_STOP_TIMEOUT_S = 30.0


class PipedProcess:
    """Started here; ends with ``close``."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        """``environment`` replaces the whole environment. Raises OSError where the program cannot be started."""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, line: str) -> dict[str, Any] | None:
        """The answer to one line; see ``read``."""
        assert self._process.stdin is not None, "the process was started with a pipe"
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any] | None:
        """The next answer; ``None`` where the process has ended. Lines that libraries print between are passed over."""
        assert self._process.stdout is not None, "the process was started with a pipe"
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return None

    def close(self) -> int:
        """Ends the process, by force after half a minute, and returns its exit status. May be called twice."""
        assert self._process.stdin is not None, "the process was started with a pipe"
        assert self._process.stdout is not None, "the process was started with a pipe"
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        return self._process.returncode
