"""A prompt compressor in an environment of its own, asked line by line over a pipe.

The scripts lie beside the benches (``eval/benches/peers``) and import nothing of ours: the packages need other versions
of libraries that we use too.
"""

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_STOP_TIMEOUT_S = 30.0
SCRIPTS = Path(__file__).resolve().parent / "benches" / "peers"


class CompressorProcess:
    """One compressor; the process is started here and ends with ``close``."""

    def __init__(self, python: Path, script: str, arguments: Sequence[str] = ()) -> None:
        """Starts ``script`` by ``python``. Raises RuntimeError if it ends before it says that it is ready."""
        self._process = subprocess.Popen(
            [str(python), str(SCRIPTS / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.version: str = self._read()["version"]

    def compress(self, question: str, passages: Sequence[str], target_tokens: int) -> dict[str, Any]:
        """What is left of the passages: ``text`` and ``seconds``, and ``error`` where the compressor failed."""
        assert self._process.stdin is not None
        asked = {"question": question, "passages": list(passages), "target_tokens": target_tokens}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the compressor ended with code {self._process.returncode} before it answered")
        found: dict[str, Any] = json.loads(line)
        return found
