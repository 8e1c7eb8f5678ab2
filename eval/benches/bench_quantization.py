"""Measures a quantized format against the unquantized model and keeps the record that a start asks for.

    firsttoken eval quantization --quantization int8 --data nq.jsonl.gz --output eval/results/quantization_int8.json

Both models are in this process, with the same dtype and kernels: logits do not travel over HTTP.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath

from msgspec import structs

from engine.chat_template import ChatTokenizer
from engine.config import CacheConfig, DType, EngineConfig, KVCacheDType, ModelConfig, QuantizationName
from engine.errors import ModelError
from engine.model_runner import ModelRunner, gate_key
from engine.model_store import resolve_model
from engine.quantization_gate import GateFigure, GateRecord, quantization_format, write_gate_record
from engine.tokenizer import Tokenizer
from eval.benches.quantization_probes import (
    ModelPair,
    Step,
    answer_cases,
    ask_needle,
    compare_text,
    make_needles,
    prompt_start,
)
from eval.datasets import Dataset
from eval.errors import EvalError
from eval.manifest import DataFile, make_machine_manifest
from eval.quantization import (
    Limits,
    QuantizationReport,
    judge,
    paired,
    summarise_needles,
    summarise_positions,
)

_BLOCK_SIZE = 16
_NEEDLE_LENGTHS = (256, 1024, 2048, 4096, 8192)
_MIN_TEXT_TOKENS = 16
_MAX_CHARS_PER_TOKEN = 8
"""Of whole texts; single tokens may be longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOptions:
    """What is measured and how much of it."""

    model: str
    quantization: QuantizationName = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    dtype: DType = "auto"
    max_length: int = 2048
    """Longest text and needle, tokens; the window of the model is the limit in any case."""
    num_texts: int = 8
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    needles_per_cell: int = 2
    max_prompt_tokens: int = 1024
    """Of a question with its passages."""
    max_answer_tokens: int = 24
    num_threads: int | None = None
    seed: int = 0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.quantization == "none" and self.kv_cache_dtype == "auto":
            raise EvalError("nothing is quantized: name --quantization or --kv-cache-dtype")
        for name in ("max_length", "num_texts", "max_prompt_tokens", "max_answer_tokens"):
            if getattr(self, name) < 1:
                raise EvalError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class RealText:
    """Text that perplexity is measured on and that needles are hidden in."""

    name: str
    content: str


def manual_text() -> RealText:
    """English prose that every Python brings: the reference of the language."""
    from pydoc_data.topics import topics

    return RealText("reference of the Python language", "\n\n".join(topics[name] for name in sorted(topics)))


def passages_text(dataset: Dataset) -> RealText:
    """The passages of a data set, each once."""
    texts = dict.fromkeys(chunk.text for case in dataset.cases for chunk in case.chunks)
    return RealText(f"passages of {dataset.name}", "\n\n".join(texts))


def measure_quantization(
    options: QuantizationOptions, text: RealText, dataset: Dataset | None = None, *, step: Step = lambda what: None
) -> tuple[QuantizationReport, GateRecord]:
    """Measure and judge one format.

    Raises:
        EvalError: the text is too short, or the model cannot be read or quantized so.
    """
    try:
        path = resolve_model(options.model)
        chat = ChatTokenizer.from_path(path)
        config = _engine_config(options)
        pair = ModelPair(ModelRunner(_unquantized(config), path), ModelRunner(config, path))
        key = gate_key(config, path)
    except ModelError as error:
        raise EvalError(str(error)) from error
    max_length = min(options.max_length, pair.quantized.max_model_len)
    texts = _cut(chat.tokenizer, text, max_length, options.num_texts)
    positions = []
    for token_ids in texts:
        step("texts")
        positions.append(compare_text(pair, token_ids))
    lengths = sorted({min(length, max_length) for length in _NEEDLE_LENGTHS if length < max_length} | {max_length})
    needles = []
    for needle in make_needles(
        chat.tokenizer,
        [token_id for token_ids in texts for token_id in token_ids],
        lengths=lengths,
        depths=options.depths,
        num_per_cell=options.needles_per_cell,
        seed=options.seed,
    ):
        step(f"needles, {needle.length} tokens")
        needles.append(ask_needle(pair, needle))
    recall = []
    if dataset is not None:
        recall = answer_cases(
            pair,
            chat,
            dataset.cases,
            max_prompt_tokens=min(options.max_prompt_tokens, pair.quantized.max_model_len - options.max_answer_tokens),
            max_tokens=options.max_answer_tokens,
            step=step,
        )
    buckets = summarise_positions(positions, seed=options.seed)
    num_non_finite = sum(int((~values.is_finite).sum()) for values in positions)
    figures = judge(
        limits=options.limits,
        num_non_finite=num_non_finite,
        buckets=buckets,
        needles=needles,
        recall=recall,
        seed=options.seed,
    )
    found = [(float(needle.found_quantized), float(needle.found_reference)) for needle in needles]
    contained = [(float(case.contained_quantized), float(case.contained_reference)) for case in recall]
    manifest = make_machine_manifest(settings=_settings(options), seed=options.seed)
    record = GateRecord(
        key=key,
        model=_short_name(options.model),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        max_length=max_length,
        figures=[
            GateFigure(
                name=figure.name, value=figure.value, limit=figure.limit, bound=figure.bound, detail=figure.detail
            )
            for figure in figures
        ],
    )
    report = QuantizationReport(
        manifest=manifest,
        model=record.model,
        weights_digest=key.weights_digest,
        quantization=key.quantization,
        dtype=key.dtype,
        attention_backend=pair.quantized.info.attention_backend,
        code_version=key.code_version,
        text=text.name,
        text_sha256=hashlib.sha256(text.content.encode()).hexdigest(),
        data=_data_file(dataset),
        limits=options.limits,
        max_length=max_length,
        passed=record.has_passed,
        figures=figures,
        num_non_finite=num_non_finite,
        buckets=buckets,
        needles=summarise_needles(needles),
        needles_found=paired(*zip(*found, strict=True), seed=options.seed) if found else None,
        recall=paired(*zip(*contained, strict=True), seed=options.seed) if contained else None,
        recall_reference=_share([case.contained_reference for case in recall]),
        recall_quantized=_share([case.contained_quantized for case in recall]),
        recall_same_text=_share([case.is_same_text for case in recall]),
        notes=list(_notes(pair, max_length, [needle.found_reference for needle in needles], num_cases=len(recall))),
    )
    return report, record


def keep_record(record: GateRecord) -> Path:
    """Put the record where a start looks for it. Raises EvalError."""
    try:
        return write_gate_record(record)
    except OSError as error:
        raise EvalError(f"the record cannot be kept: {error}") from error


def num_steps(options: QuantizationOptions, num_cases: int) -> int:
    """Steps of which ``measure_quantization`` tells, about."""
    num_lengths = len([length for length in _NEEDLE_LENGTHS if length < options.max_length]) + 1
    return options.num_texts + num_lengths * len(options.depths) * options.needles_per_cell + 2 * num_cases


def _engine_config(options: QuantizationOptions) -> EngineConfig:
    num_tokens = options.max_prompt_tokens + options.max_answer_tokens
    return EngineConfig(
        model=ModelConfig(model=options.model, dtype=options.dtype, quantization=options.quantization),
        cache=CacheConfig(
            block_size=_BLOCK_SIZE,
            num_blocks=-(-num_tokens // _BLOCK_SIZE),
            kv_cache_dtype=options.kv_cache_dtype,
        ),
        num_threads=options.num_threads,
    )


def _unquantized(config: EngineConfig) -> EngineConfig:
    return structs.replace(
        config,
        model=structs.replace(config.model, quantization="none"),
        cache=structs.replace(config.cache, kv_cache_dtype="auto"),
    )


def _cut(tokenizer: Tokenizer, text: RealText, max_length: int, num_texts: int) -> list[list[int]]:
    """Texts of ``max_length`` tokens from all over ``text``, fewer or shorter where there is not so much of it."""
    start = prompt_start(tokenizer)
    size = max_length - len(start)
    stride = max(len(text.content) // num_texts, size)
    # Only what can be needed is encoded: a data set has many times as much.
    pieces = [
        tokenizer.encode(text.content[place : place + min(stride, size * _MAX_CHARS_PER_TOKEN)])[:size]
        for place in range(0, len(text.content), stride)
    ]
    cut = [[*start, *piece] for piece in pieces[:num_texts] if len(piece) >= _MIN_TEXT_TOKENS]
    if not cut:
        raise EvalError(f"{text.name} has fewer than {_MIN_TEXT_TOKENS} tokens")
    return cut


def _notes(pair: ModelPair, max_length: int, found_reference: Sequence[bool], *, num_cases: int) -> Iterable[str]:
    if max_length < pair.quantized.max_model_len:
        yield f"prompts of {max_length + 1} to {pair.quantized.max_model_len} tokens were not measured"
    if not any(found_reference):
        yield "the unquantized model finds no needle, so that none can be lost"
    if not num_cases:
        yield "no task recall was measured: name cases with --data"


def _data_file(dataset: Dataset | None) -> DataFile | None:
    if dataset is None:
        return None
    return DataFile(
        name=dataset.name,
        sha256=dataset.sha256,
        num_cases=len(dataset.cases),
        num_cases_in_file=dataset.num_cases_in_file,
    )


def _settings(options: QuantizationOptions) -> dict[str, object]:
    return {
        "model": _short_name(options.model),
        "quantization": quantization_format(_engine_config(options)),
        "dtype": options.dtype,
        "max_length": options.max_length,
        "num_texts": options.num_texts,
        "depths": list(options.depths),
        "needles_per_cell": options.needles_per_cell,
        "max_prompt_tokens": options.max_prompt_tokens,
        "max_answer_tokens": options.max_answer_tokens,
        "num_threads": options.num_threads,
    }


def _short_name(model: str) -> str:
    return PurePath(model).name if PurePath(model).is_absolute() or model.startswith((".", "~")) else model


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
