"""The native CPU kernels against this machine's ceiling, and whole prefills and decodes against other engines.

    python -m eval.benches.bench_kernels --openvino FOLDER --output eval/results/kernels.json

Everything that is compared takes turns in one process (OpenVINO in its own, between the others' turns), and a ratio is
the median of the ratios of neighbours, so that what else the machine does hits both. ``--threads 1`` counts the time of
the processor, which leaves out what other processes take: the choice on a machine that is not quiet.

    attention      GFLOP/s of the causal half only, as a share of the bf16 matrix product timed just before it
    prefill        tokens per second to the first token of one prompt of random ids
    decode         tokens per second of all sequences together
    shares         where a step's time goes, one thread, processor time
"""

import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from rich.console import Console
from rich.table import Table

from engine.model_store import resolve_model
from eval.benches.kernel_records import AttentionResult, Comparison, EngineRate, KernelReport, Share
from eval.benches.prefill_engines import CLOCKS, Clock, OpenVinoEngine, OwnEngine, PrefillEngine, TransformersEngine
from eval.errors import EvalError
from eval.manifest import make_machine_manifest
from eval.records import encode_report
from kernels.attention import AttentionBackend, AttentionMetadata, get_attention_backend
from kernels.linear import linear, pack_weight
from kernels.native.library import NativeKernels, native_kernels, using_kernels

LENGTHS = (512, 2048, 4096, 7900)
OURS = "firsttoken bf16"
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 9, 3, 64, 16
_GEMM_SHAPE = (2048, 576, 2048)
_LONG = 4096
_DECODE_CONTEXT, _DECODE_TOKENS = 512, 32


def measure_attention(kernels: NativeKernels, num_tokens: int, *, clock: Clock, num_rounds: int) -> AttentionResult:
    """One layer of SmolLM2's shape: 9 query heads, 3 KV heads of 64, cache in shuffled blocks."""
    now = CLOCKS[clock]
    with using_kernels(kernels):
        native = get_attention_backend("native", dtype=torch.bfloat16)
    sdpa, tiled = (get_attention_backend(name, dtype=torch.bfloat16) for name in ("sdpa", "tiled"))
    qkv = torch.randn(num_tokens, _NUM_HEADS + 2 * _NUM_KV_HEADS, _HEAD_DIM).bfloat16()
    q, k, v = torch.split(qkv, [_NUM_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS], dim=1)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    metadata = AttentionMetadata.build([num_tokens], [0], [torch.randperm(num_blocks).tolist()], _BLOCK_SIZE)
    cache = torch.zeros(2, num_blocks, _BLOCK_SIZE, _NUM_KV_HEADS, _HEAD_DIM, dtype=torch.bfloat16)
    cache.flatten(1, 2)[0, metadata.slot_mapping] = k
    cache.flatten(1, 2)[1, metadata.slot_mapping] = v

    def attend(backend: AttentionBackend) -> Callable[[], object]:
        prepared = backend.prepare(metadata, dtype=torch.bfloat16)
        return lambda: backend.attend(q, k, v, cache, prepared, _HEAD_DIM**-0.5)

    rows, inner, columns = _GEMM_SHAPE
    x, weight = torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()
    with using_kernels(kernels):
        packed = pack_weight(weight)
    with using_kernels(None):
        packed_onednn = pack_weight(weight)
    gemm_flops = 2.0 * rows * inner * columns
    attention_flops = 4.0 * _NUM_HEADS * _HEAD_DIM * num_tokens * (num_tokens + 1) / 2
    work: dict[str, tuple[Callable[[], object], float]] = {
        "gemm": (lambda: linear(x, packed_onednn), gemm_flops),
        "native": (attend(native), attention_flops),
        "gemm_native": (lambda: linear(x, packed), gemm_flops),
        "sdpa": (attend(sdpa), attention_flops),
        "tiled": (attend(tiled), attention_flops),
    }
    rates: dict[str, list[float]] = {name: [] for name in work}
    for round_index in range(num_rounds + 1):
        for name, (run, flops) in work.items():
            started = now()
            run()
            if round_index:  # the first one warms up
                rates[name].append(flops / (now() - started) / 1e9)
    median = {name: statistics.median(values) for name, values in rates.items()}
    return AttentionResult(
        num_tokens=num_tokens,
        share_of_gemm=_median_ratio(rates["native"], rates["gemm"]),
        native_over_sdpa=_median_ratio(rates["native"], rates["sdpa"]),
        **median,
    )


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def compare(
    engines: Sequence[PrefillEngine],
    measure: Callable[[PrefillEngine], float | None],
    *,
    num_tokens: int,
    batch_size: int,
    computed_tokens: int,
    num_rounds: int,
) -> Comparison:
    """Let all engines do the same, in turns; each round begins with another one.

    Args:
        engines: the first is ours, the one that ratios are formed with.
        measure: seconds of one engine, ``None`` where it does not take part.
        num_tokens: length of the prompt or context, for the record.
        batch_size: for the record.
        computed_tokens: tokens that rates are formed with.
        num_rounds: after one that warms up, which prompts that take seconds do without.
    """
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for round_index in range(0 if computed_tokens < _LONG else 1, num_rounds + 1):
        turn = round_index % len(engines)
        for engine in (*engines[turn:], *engines[:turn]):
            taken = measure(engine)
            if round_index and taken is not None:
                seconds[engine.name].append(taken)
    ours = seconds[engines[0].name]
    return Comparison(
        num_tokens=num_tokens,
        batch_size=batch_size,
        num_rounds=num_rounds,
        engines=[
            EngineRate(
                name=name,
                tokens_per_s=computed_tokens / statistics.median(values),
                ours_over_it=_median_ratio(values, ours),
            )
            for name, values in seconds.items()
            if values
        ],
    )


def measure_share(kernels: NativeKernels, model_path: Path, num_tokens: int) -> Share:
    """Time in each kernel of one prefill, by the processor time of one thread."""
    now = CLOCKS["processor"]
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Any) -> Any:
        def call(arguments: Any) -> Any:
            started = now()
            status = function(arguments)
            spent[name] += now() - started
            return status

        return call

    functions = {name: timed(name, function) for name, function in kernels.functions.items()}
    num_threads = torch.get_num_threads()
    engine = OwnEngine(
        "shares",
        model_path,
        kernels=NativeKernels(kernels.isa, kernels.panel, functions),
        num_threads=1,
        max_model_len=num_tokens,
        clock="processor",
    )
    rounds: list[tuple[float, dict[str, float]]] = []
    for _ in range(4):
        spent.clear()
        total = engine.prefill(random_ids(num_tokens))
        rounds.append((total, {name: value / total for name, value in spent.items()}))
    torch.set_num_threads(num_threads)
    _, parts = min(rounds, key=lambda timed_round: timed_round[0])
    products = sum(value for name, value in parts.items() if name.startswith("linear"))
    return Share(
        num_tokens=num_tokens,
        products=products,
        attention=parts["attention"],
        other=1.0 - products - parts["attention"],
        kernels=parts,
    )


def random_ids(num_tokens: int) -> list[int]:
    """The same ids in every run."""
    generator = random.Random(num_tokens)
    return [generator.randrange(100, 40_000) for _ in range(num_tokens)]


def over_best_peer(prefill: Sequence[Comparison]) -> float | None:
    """Geometric mean over the lengths of ours over the faster peer; ``None`` without peers."""
    ratios = []
    for comparison in prefill:
        peers = [rate.ours_over_it for rate in comparison.engines if not rate.name.startswith("firsttoken")]
        if peers:
            ratios.append(min(peers))
    return statistics.geometric_mean(ratios) if ratios else None


def run(console: Console, kernels: NativeKernels, options: "Options", openvino: Path | None) -> KernelReport:
    """Measure everything and print it as it comes."""
    torch.manual_seed(0)
    load_average = os.getloadavg()[0]
    clock: Clock = "processor" if options.num_threads == 1 else "wall"
    torch.set_num_threads(options.num_threads)
    attention = []
    for length in options.lengths:
        attention.append(measure_attention(kernels, length, clock=clock, num_rounds=_rounds(length, options)))
        _print_attention(console, attention[-1])
    model_path = resolve_model(options.model)
    shares = [measure_share(kernels, model_path, length) for length in options.lengths[:2]]
    for share in shares:
        console.print(
            f"one prefill of {share.num_tokens:,}: products {share.products:.1%}, attention {share.attention:.1%}, "
            f"all else {share.other:.1%}"
        )
    torch.set_num_threads(options.num_threads)
    with ExitStack() as stack:
        settings: dict[str, Any] = {
            "num_threads": options.num_threads,
            "max_model_len": max(8192, *options.lengths),
            "clock": clock,
        }
        engines: list[PrefillEngine] = [
            OwnEngine(OURS, model_path, kernels=kernels, **settings),
            OwnEngine(f"{OURS}, steps of 512", model_path, kernels=kernels, chunk_size=512, **settings),
            OwnEngine("firsttoken int8", model_path, kernels=kernels, quantization="int8", **settings),
            OwnEngine(f"{OURS}, no native kernels", model_path, kernels=None, **settings),
            TransformersEngine(model_path, clock=clock),
        ]
        version = None
        if openvino is not None:
            peer = OpenVinoEngine(openvino, model_path, num_threads=options.num_threads, clock=clock)
            engines.append(peer)
            version = peer.version
        for engine in engines:
            stack.callback(engine.close)
        prefill = []
        for length in options.lengths:
            ids = random_ids(length)
            prefill.append(
                compare(
                    engines,
                    lambda engine, ids=ids: engine.prefill(ids),  # type: ignore[misc]
                    num_tokens=length,
                    batch_size=1,
                    computed_tokens=length,
                    num_rounds=_rounds(length, options),
                )
            )
            _print_comparison(console, "prefill", prefill[-1])
        decode = []
        # steps of 512 are the same as the first here
        for batch_size in (1, 8):
            decode.append(
                compare(
                    [engine for engine in engines if "steps of" not in engine.name],
                    lambda engine, size=batch_size: engine.decode(size, _DECODE_CONTEXT, _DECODE_TOKENS),  # type: ignore[misc]
                    num_tokens=_DECODE_CONTEXT,
                    batch_size=batch_size,
                    computed_tokens=batch_size * _DECODE_TOKENS,
                    num_rounds=options.max_rounds,
                )
            )
            _print_comparison(console, "decode", decode[-1])
    return KernelReport(
        manifest=make_machine_manifest(settings=msgspec.to_builtins(options), seed=0),
        isa=kernels.isa,
        clock=clock,
        load_average=load_average,
        openvino_version=version,
        attention=attention,
        prefill=prefill,
        decode=decode,
        shares=shares,
        prefill_over_best_peer=over_best_peer(prefill),
    )


def _rounds(num_tokens: int, options: "Options") -> int:
    """Fewer of what takes long."""
    return max(2, min(options.max_rounds, 8192 // num_tokens))


def _print_attention(console: Console, result: AttentionResult) -> None:
    console.print(
        f"attention {result.num_tokens:,} tokens: native {result.native:,.0f} GFLOP/s, {result.share_of_gemm:.0%} of "
        f"the bf16 product ({result.gemm:,.0f}; our own {result.gemm_native:,.0f}), {result.native_over_sdpa:.1f} x "
        f"SDPA ({result.sdpa:,.0f}), tiled {result.tiled:,.0f}"
    )


def _print_comparison(console: Console, what: str, comparison: Comparison) -> None:
    title = f"{what}, {comparison.num_tokens:,} tokens, batch {comparison.batch_size}"
    table = Table(title=title, title_justify="left")
    table.add_column("engine")
    for heading in ("tokens/s", "ours / it"):
        table.add_column(heading, justify="right")
    for rate in comparison.engines:
        table.add_row(rate.name, f"{rate.tokens_per_s:,.0f}", f"{rate.ours_over_it:.2f}")
    console.print(table)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the bench."""

    model: str
    lengths: tuple[int, ...]
    num_threads: int
    max_rounds: int


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True, help="A GGUF file or catalogue name.")
@click.option("--length", "lengths", multiple=True, type=click.IntRange(min=2), help="Prompt length; several times.")
@click.option("--threads", type=click.IntRange(min=1), help="By default one per core.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Most rounds.")
@click.option("--openvino", type=click.Path(path_type=Path, exists=True), help="From peers/make_openvino.sh.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
def main(
    model: str, lengths: tuple[int, ...], threads: int | None, rounds: int, openvino: Path | None, output: Path | None
) -> None:
    """Measure the native kernels."""
    console = Console(stderr=True)
    kernels = native_kernels()
    if kernels is None:
        raise click.ClickException("there are no native kernels on this machine; the log says why")
    options = Options(
        model=model,
        lengths=lengths or LENGTHS,
        num_threads=threads or torch.get_num_threads(),
        max_rounds=rounds,
    )
    try:
        result = run(console, kernels, options, openvino)
    except EvalError as error:
        raise click.ClickException(str(error)) from None
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(encode_report(result))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
