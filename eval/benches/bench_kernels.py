"""The native CPU kernels against this machine's ceiling, and whole prefills and decodes against other engines.

    python -m eval.benches.bench_kernels --peers FOLDER --output eval/results/kernels.json

Everything that is compared takes turns (peers in processes of their own, between the others' turns), and a ratio is the
median of the ratios of neighbours, so that what else the machine does hits both. ``--threads 1`` counts the time of the
processor, which leaves out what other processes take: the choice on a machine that is not quiet; vLLM and llama.cpp
take no part then. Twenty minutes on two cores with all peers.

    attention      GFLOP/s of the causal half only, as a share of the bf16 matrix product timed just before it
    prefill        tokens per second to the first token of one prompt of random ids
    decode         tokens per second of all sequences together
    shares         where a step's time goes
    start          seconds from the start of the process until the gateway is ready, and its peak memory
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import click
import msgspec
import torch
from rich.console import Console
from rich.table import Table

from engine.model_store import resolve_model
from engine.weights import open_checkpoint
from eval.benches.kernel_records import AttentionResult, Comparison, EngineRate, KernelReport, Share, StartResult
from eval.benches.peer_engines import EngineSettings, start_peers
from eval.benches.prefill_engines import CLOCKS, Clock, OwnEngine, PrefillEngine, TransformersEngine
from eval.benches.start_probe import measure_start
from eval.errors import EvalError
from eval.manifest import make_machine_manifest
from eval.records import encode_report
from kernels.attention import AttentionBackend, AttentionMetadata, get_attention_backend
from kernels.linear import linear, pack_weight
from kernels.native.library import NativeKernels, native_kernels, using_kernels

LENGTHS = (512, 2048, 4096, 7900)
OURS = "firsttoken bf16"
OURS_INT8 = "firsttoken int8"
_DEFAULT_MODEL = "smollm2-135m-instruct"
_MAX_DECODE_ROUNDS = 4
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 9, 3, 64, 16
_GEMM_SHAPE = (2048, 576, 2048)
_LONG = 4096
_DECODE_CONTEXT, _DECODE_TOKENS = 512, 32
_SETTLE_S = 0.5


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
    settle_s: float = 0.0,
) -> Comparison:
    """Let all engines do the same, in turns; each round begins with another one.

    Args:
        engines: the first is ours, the one that ratios are formed with.
        measure: seconds of one engine, ``None`` where it does not take part.
        num_tokens: length of the prompt or context, for the record.
        batch_size: for the record.
        computed_tokens: tokens that rates are formed with.
        num_rounds: after one that warms up, which prompts that take seconds do without.
        settle_s: pause before a turn, in which threads of the engine before stop to spin.
    """
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for round_index in range(0 if computed_tokens < _LONG else 1, num_rounds + 1):
        turn = round_index % len(engines)
        for engine in (*engines[turn:], *engines[:turn]):
            time.sleep(settle_s)
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


def measure_share(engine: OwnEngine, num_tokens: int, num_rounds: int) -> Share | None:
    """Where the time of one prefill goes, the fastest of some; ``None`` where the layers are not one call."""
    rounds = []
    for _ in range(num_rounds):
        measured = engine.layer_times(random_ids(num_tokens))
        if measured is None:
            return None
        rounds.append(measured)
    seconds, times = min(rounds, key=lambda measured: measured[0])
    products, attention, norms, rotary = (
        value / seconds for value in (times.products, times.attention, times.norms, times.rotary)
    )
    return Share(
        num_tokens=num_tokens,
        products=products,
        attention=attention,
        other=1.0 - products - attention,
        norms=norms,
        rotary=rotary,
        rest=1.0 - products - attention - norms - rotary,
    )


def random_ids(num_tokens: int) -> list[int]:
    """The same ids in every run."""
    generator = random.Random(num_tokens)
    return [generator.randrange(100, 40_000) for _ in range(num_tokens)]


def over_best_peer(prefill: Sequence[Comparison], ours: str | None = None) -> float | None:
    """Geometric mean over the lengths of ours over the fastest peer; ``None`` without peers.

    ``ours`` names one of our engines, by default the one that ratios are formed with.
    """
    ratios = []
    for comparison in prefill:
        peers = [rate.ours_over_it for rate in comparison.engines if not rate.name.startswith("firsttoken")]
        own = [rate.ours_over_it for rate in comparison.engines if rate.name == ours]
        if peers and (ours is None or own):
            ratios.append(min(peers) / (own[0] if own else 1.0))
    return statistics.geometric_mean(ratios) if ratios else None


def run(console: Console, kernels: NativeKernels, options: "Options", peers: Path | None) -> KernelReport:
    """Measure everything and print it as it comes."""
    torch.manual_seed(0)
    load_average = os.getloadavg()[0]
    clock: Clock = "processor" if options.num_threads == 1 else "wall"
    torch.set_num_threads(options.num_threads)
    model_path = resolve_model(options.model)
    start = None
    if options.num_starts:
        checkpoint = open_checkpoint(resolve_model(_DEFAULT_MODEL))
        num_parameters = sum(values.numel() for _, values, _ in checkpoint.tensors())
        longest = max(options.lengths)
        start = measure_start(checkpoint.spec, num_parameters, longest, num_starts=options.num_starts)
        _print_start(console, start)
    attention = []
    for length in options.lengths:
        attention.append(measure_attention(kernels, length, clock=clock, num_rounds=_rounds(length, options)))
        _print_attention(console, attention[-1])
    with ExitStack() as stack:
        settings: EngineSettings = {"num_threads": options.num_threads, "clock": clock}
        max_model_len = max(8192, *options.lengths)
        own = OwnEngine(OURS, model_path, kernels=kernels, max_model_len=max_model_len, **settings)
        transformers = TransformersEngine(model_path, clock=clock)
        engines: list[PrefillEngine] = [
            own,
            OwnEngine(
                OURS_INT8, model_path, kernels=kernels, quantization="int8", max_model_len=max_model_len, **settings
            ),
            OwnEngine(f"{OURS}, no native kernels", model_path, kernels=None, max_model_len=max_model_len, **settings),
            transformers,
        ]
        versions: dict[str, str] = {}
        chosen: dict[str, str] = {}
        if peers is not None:
            found, versions, chosen = start_peers(stack, peers, model_path, transformers, settings)
            engines += found
        shares = []
        for length in options.lengths:
            share = measure_share(own, length, _rounds(length, options))
            if share is not None:
                shares.append(share)
                console.print(
                    f"one prefill of {share.num_tokens:,}: products {share.products:.1%}, attention "
                    f"{share.attention:.1%}, all else {share.other:.1%}"
                )
        prefill = []
        for length in options.lengths:
            ids = random_ids(length)
            prefill.append(
                compare(
                    engines,
                    lambda engine, ids=ids: engine.prefill(ids),  # type: ignore[misc]
                    settle_s=_SETTLE_S,
                    num_tokens=length,
                    batch_size=1,
                    computed_tokens=length,
                    num_rounds=_rounds(length, options),
                )
            )
            _print_comparison(console, "prefill", prefill[-1])
        decode = []
        for batch_size in (1, 8):
            decode.append(
                compare(
                    engines,
                    lambda engine, size=batch_size: engine.decode(size, _DECODE_CONTEXT, _DECODE_TOKENS),  # type: ignore[misc]
                    settle_s=_SETTLE_S,
                    num_tokens=_DECODE_CONTEXT,
                    batch_size=batch_size,
                    computed_tokens=batch_size * _DECODE_TOKENS,
                    num_rounds=min(options.max_rounds, _MAX_DECODE_ROUNDS),
                )
            )
            _print_comparison(console, "decode", decode[-1])
    return KernelReport(
        manifest=make_machine_manifest(settings=msgspec.to_builtins(options), seed=0),
        isa=kernels.isa,
        clock=clock,
        load_average=load_average,
        peers=versions,
        peer_settings=chosen,
        attention=attention,
        prefill=prefill,
        decode=decode,
        shares=shares,
        prefill_over_best_peer=over_best_peer(prefill),
        int8_over_best_peer=over_best_peer(prefill, OURS_INT8),
        start=start,
    )


def _rounds(num_tokens: int, options: "Options") -> int:
    """Fewer of what takes long."""
    return max(2, min(options.max_rounds, 8192 // num_tokens))


def _print_start(console: Console, start: StartResult) -> None:
    console.print(
        f"ready after {start.seconds_to_ready:.1f} s; memory of the engine {start.engine_peak_bytes / 1e9:.2f} GB, "
        f"of all processes {start.total_peak_bytes / 1e9:.2f} GB; weights {start.weight_bytes / 1e9:.2f} GB, "
        f"KV cache {start.kv_bytes / 1e9:.2f} GB"
    )


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
    num_starts: int
    """Of the gateway, which serves the default model; 0 leaves that out."""


@click.command()
@click.option("--model", default=_DEFAULT_MODEL, show_default=True, help="A GGUF file or catalogue name.")
@click.option("--length", "lengths", multiple=True, type=click.IntRange(min=2), help="Prompt length; several times.")
@click.option("--threads", type=click.IntRange(min=1), help="By default one per core.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Most rounds.")
@click.option("--starts", type=click.IntRange(min=0), default=3, show_default=True, help="Of the gateway.")
@click.option(
    "--peers",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with the environments openvino, llama, vllm, as peers/make_*.sh make them; those that are there.",
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
def main(
    model: str,
    lengths: tuple[int, ...],
    threads: int | None,
    rounds: int,
    starts: int,
    peers: Path | None,
    output: Path | None,
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
        num_starts=starts,
    )
    try:
        result = run(console, kernels, options, peers)
    except EvalError as error:
        raise click.ClickException(str(error)) from None
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(encode_report(result))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
