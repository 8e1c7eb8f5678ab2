"""Whether a quantized format may be served: the record of its regression gate, and what a start does with it.

``firsttoken eval quantization`` measures a format against the unquantized model and leaves a record in the cache
folder. A record speaks for exactly what was measured: these weights, format and dtype, this code of the kernels. ::

    $FIRSTTOKEN_CACHE/quantization/<weights>-int8-bf16-<code>.json

    record          forced    start
    passed          either    serves
    failed, none    no        is refused, with the figures
    failed, none    yes       serves, and says so in its log and in ``ModelInfo.quantization_gate``
"""

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import Literal

import msgspec

from engine import model_store
from engine.config import EngineConfig
from engine.errors import ModelError

logger = logging.getLogger(__name__)

GateStatus = Literal["none", "passed", "forced_failed", "forced_unmeasured"]
"""``none``: nothing is quantized."""

_SOURCES = ("*.py", "*.cpp", "*.h")
_NAME_DIGITS = 16


class GateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a record speaks for."""

    weights_digest: str
    quantization: str
    """See ``quantization_format``."""
    dtype: str
    """Of the computation, never ``auto``."""
    code_version: str
    """See ``kernel_code_version``."""


class GateFigure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured figure and its limit."""

    name: str
    value: float
    """What is compared with the limit."""
    limit: float
    bound: Literal["at most", "at least"]
    detail: str = ""
    """Estimate and interval for people."""

    @property
    def is_met(self) -> bool:
        """The figure keeps its limit; one that is not a number does not."""
        return self.value <= self.limit if self.bound == "at most" else self.value >= self.limit

    def line(self) -> str:
        """One line for people."""
        verdict = "ok    " if self.is_met else "FAILED"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{verdict} {self.name}: {self.value:.4g}, {self.bound} {self.limit:.4g}{detail}"


class GateRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of one run of the gate."""

    key: GateKey
    model: str
    """Name of the model, without folders."""
    date: str
    """UTC, ISO 8601."""
    max_length: int
    """Longest prompt that was measured, in tokens."""
    figures: list[GateFigure]

    @property
    def has_passed(self) -> bool:
        """Something was measured and every figure keeps its limit."""
        return bool(self.figures) and all(figure.is_met for figure in self.figures)

    def lines(self) -> list[str]:
        """The figures for people, those that failed first."""
        return [figure.line() for figure in sorted(self.figures, key=lambda figure: figure.is_met)]


def quantization_format(config: EngineConfig) -> str:
    """``none``, ``int8``, ``fp8``, and behind it the format of the KV cache if it has one: ``int8+kv_fp8``."""
    name: str = config.model.quantization
    kv = config.cache.kv_cache_dtype
    return name if kv == "auto" else f"{name}+kv_{kv}"


@functools.cache
def kernel_code_version() -> str:
    """SHA-256, as hex, over the sources of the package ``kernels``: another code may round otherwise."""
    spec = importlib.util.find_spec("kernels")
    assert spec is not None, "the package kernels is part of this distribution"
    assert spec.origin is not None, "the package kernels has an __init__"
    folder = Path(spec.origin).parent
    digest = hashlib.sha256()
    for file in sorted(file for pattern in _SOURCES for file in folder.rglob(pattern)):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def gate_file(key: GateKey, cache_dir: Path | None = None) -> Path:
    """Where the record of ``key`` is, or would be."""
    cache_dir = cache_dir if cache_dir is not None else model_store.cache_dir()
    weights, code = key.weights_digest[:_NAME_DIGITS], key.code_version[:_NAME_DIGITS]
    return cache_dir / "quantization" / f"{weights}-{key.quantization}-{key.dtype}-{code}.json"


def read_gate_record(key: GateKey, cache_dir: Path | None = None) -> GateRecord | None:
    """The record of exactly ``key``; ``None`` where there is none that can be read and says it is of this key."""
    file = gate_file(key, cache_dir)
    try:
        record = msgspec.json.decode(file.read_bytes(), type=GateRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("the record %s cannot be read and is ignored: %s", file, error)
        return None
    return record if record.key == key else None


def write_gate_record(record: GateRecord, cache_dir: Path | None = None) -> Path:
    """Keep a record, in place of an earlier one of the same key: whole or not at all. Raises OSError."""
    file = gate_file(record.key, cache_dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        draft.replace(file)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return file


def check_gate(config: EngineConfig, key: GateKey, cache_dir: Path | None = None) -> GateStatus:
    """Decide about a start, and log what was decided.

    Args:
        config: of the engine that is to start; ``model.force_quantization`` decides where the record does not.
        key: of what it would serve.
        cache_dir: where records are, by default in the user's cache folder.

    Raises:
        ModelError: the format is quantized, has no record or a failed one, and is not forced; with all figures.
    """
    if key.quantization == "none":
        return "none"
    record = read_gate_record(key, cache_dir)
    what = f"quantization {key.quantization} of {Path(config.model.model).name} in {key.dtype}"
    if record is not None and record.has_passed:
        logger.info("%s has passed its gate of %s, up to %d tokens", what, record.date, record.max_length)
        window = config.model.max_model_len
        if window is None or window > record.max_length:
            logger.warning("%s: prompts of more than %d tokens have not been measured", what, record.max_length)
        return "passed"
    if record is None:
        reason = f"{what} has not been measured with these weights and kernels"
    else:
        reason = "\n  ".join((f"{what} has failed its regression gate of {record.date}:", *record.lines()))
    if not config.model.force_quantization:
        raise ModelError(f"{reason}\n{_advice(config, is_measured=record is not None)}")
    logger.warning("served by force although %s", reason)
    return "forced_unmeasured" if record is None else "forced_failed"


def _advice(config: EngineConfig, *, is_measured: bool) -> str:
    command = f"firsttoken eval quantization --model {config.model.model} --dtype {config.model.dtype}"
    command += f" --quantization {config.model.quantization}"
    if config.cache.kv_cache_dtype != "auto":
        command += f" --kv-cache-dtype {config.cache.kv_cache_dtype}"
    again = "Measure again with" if is_measured else "Measure it with"
    return (
        f"{again}: {command}\nor serve it nevertheless: --force-quantization (engine.model.force_quantization = true)"
    )
