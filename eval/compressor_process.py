"""A prompt compressor in an environment of its own, asked line by line over a pipe.

The scripts lie beside the benches (``eval/benches/peers``) and import nothing of ours: the packages need other versions
of libraries that we use too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.piped_process import PipedProcess

SCRIPTS = Path(__file__).resolve().parent / "benches" / "peers"


class CompressorProcess:
    """One compressor; the process is started here and ends with ``close``."""

    def __init__(self, python: Path, script: str, arguments: Sequence[str] = ()) -> None:
        """Starts ``script`` by ``python``. Raises RuntimeError if it ends before it says that it is ready."""
        self._process = PipedProcess([str(python), str(SCRIPTS / script), *arguments])
        self.version: str = self._answered(self._process.read())["version"]

    def compress(self, question: str, passages: Sequence[str], target_tokens: int) -> dict[str, Any]:
        """What is left of the passages: ``text`` and ``seconds``, and ``error`` where the compressor failed."""
        asked = {"question": question, "passages": list(passages), "target_tokens": target_tokens}
        return self._answered(self._process.ask(json.dumps(asked)))

    def close(self) -> None:
        """Ends the process."""
        self._process.close()

    def _answered(self, answer: dict[str, Any] | None) -> dict[str, Any]:
        if answer is None:
            raise RuntimeError(f"the compressor ended with code {self._process.close()} before it answered")
        return answer
