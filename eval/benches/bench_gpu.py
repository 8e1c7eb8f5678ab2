"""The attention backends of a GPU against its measured ceilings, and a whole prefill of a Llama-8B-shaped model.

    python -m eval.benches.bench_gpu --output eval/results/gpu.json

First every backend is checked against the fp32 reference; one that errs more than twice as much as plain torch ends
the bench. Then, each figure the median of rounds timed by CUDA events:

    ceilings    TFLOP/s of a large bf16 matrix product, GB/s of a large copy (read and write counted)
    prefill     TFLOP/s of the causal half, as a share of the product's; 32 query heads, 8 KV heads of 128
    decode      GB/s of the keys and values that are read, as a share of the copy's
    model       tokens per second of one prompt through 32 layers of random weights, 8 billion parameters

It stops after ``--limit-s`` seconds, by default 420: what has not begun by then is left out, which the result says.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec
import torch
from rich.console import Console

from engine.kv_cache import KVCache
from engine.model_spec import ModelSpec
from engine.models.llama import LlamaForCausalLM
from engine.rope_spec import RopeSpec
from eval.benches.gpu_records import DecodeRate, GpuReport, ModelRate, PrefillRate
from eval.manifest import make_machine_manifest
from eval.records import encode_report
from kernels.attention import AttentionBackend, AttentionMetadata, get_attention_backend
from kernels.attention.reference import attention_ref

BACKENDS = ("flash", "triton", "sdpa")
_BLOCK_SIZE = 16


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of what is measured; those of Llama 3 8B by default."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32
    vocab_size: int = 128256
    ceiling_size: int = 8192
    """Rows, columns and inner size of the product; as many squared elements are copied."""


class Deadline:
    """Says when the bench has to come to its end."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s
        self.skipped: list[str] = []

    def allows(self, what: str) -> bool:
        """Whether there is time left to begin ``what``; noted if not."""
        if time.monotonic() < self._end:
            return True
        self.skipped.append(what)
        return False


def median_seconds(run: Callable[[], object], device: torch.device, num_rounds: int) -> float:
    """Median time of one call, after two that warm up; on a CPU by the wall clock."""
    for _ in range(2):
        run()
    times: list[float] = []
    for _ in range(num_rounds):
        if device.type == "cuda":
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


class Load:
    """A random batch over a shuffled paged cache."""

    def __init__(
        self,
        shape: Shape,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        counts = [-(-seq_len // _BLOCK_SIZE) for seq_len in seq_lens]
        ids = torch.randperm(sum(counts)).tolist()
        tables = [ids[sum(counts[:index]) :][:count] for index, count in enumerate(counts)]
        num_tokens, kv_heads = sum(query_lens), shape.num_kv_heads

        def rand(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=device, dtype=dtype)

        self.q = rand(num_tokens, shape.num_heads, shape.head_dim)
        self.k, self.v = rand(2, num_tokens, kv_heads, shape.head_dim)
        self.cache = rand(2, len(ids), _BLOCK_SIZE, kv_heads, shape.head_dim)
        self.metadata = AttentionMetadata.build(query_lens, context_lens, tables, _BLOCK_SIZE, device=device)
        self.scale = shape.head_dim**-0.5
        self.cache.flatten(1, 2)[0, self.metadata.slot_mapping] = self.k
        self.cache.flatten(1, 2)[1, self.metadata.slot_mapping] = self.v

    def attend(self, backend: AttentionBackend) -> Callable[[], torch.Tensor]:
        """One layer's attention, the step prepared beforehand."""
        prepared = backend.prepare(self.metadata, dtype=self.q.dtype)
        return lambda: backend.attend(self.q, self.k, self.v, self.cache, prepared, self.scale)


def measure_ceilings(size: int, device: torch.device, num_rounds: int) -> tuple[float, float]:
    """TFLOP/s of a bf16 product of this size, GB/s of a copy of as many elements, read and write counted."""
    a, b = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(a)
    product_s = median_seconds(lambda: torch.mm(a, b, out=out), device, num_rounds)
    copy_s = median_seconds(lambda: out.copy_(a), device, num_rounds)
    return 2.0 * size**3 / product_s / 1e12, 2.0 * a.nbytes / copy_s / 1e9


def check(
    shape: Shape, backends: Sequence[AttentionBackend], device: torch.device, num_tokens: int
) -> dict[str, float]:
    """Largest error of each backend over that of plain torch in the same dtype.

    Raises:
        click.ClickException: one errs more than twice as much.
    """
    dtype = torch.bfloat16
    load = Load(shape, (1, 1, num_tokens, num_tokens // 3), (num_tokens, 5, 0, 77), device=device, dtype=dtype)
    expected = attention_ref(load.q, load.cache, load.metadata, load.scale)
    plain = _max_error(_plain(load), expected)
    ratios = {backend.name: _max_error(load.attend(backend)(), expected) / plain for backend in backends}
    for name, ratio in ratios.items():
        if not ratio <= 2:
            raise click.ClickException(f"{name} errs {ratio:.1f} times as much as plain torch, the limit is 2")
    return ratios


def _max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).abs().max())


def _plain(load: Load) -> torch.Tensor:
    """Product, softmax, product in the dtype of the load, sequence by sequence."""
    outputs = []
    metadata = load.metadata
    for index, query in enumerate(torch.split(load.q, list(metadata.query_lens))):
        context_len, query_len = metadata.context_lens[index], query.shape[0]
        blocks = metadata.block_tables[index].long()
        keys, values = load.cache[:, blocks].flatten(1, 2)[:, : context_len + query_len].transpose(1, 2)
        group = query.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        mask = torch.ones(query_len, keys.shape[1], dtype=torch.bool, device=query.device).tril(context_len)
        scores = (query.transpose(0, 1) @ keys.transpose(1, 2) * load.scale).masked_fill(~mask, float("-inf"))
        outputs.append((scores.softmax(dim=-1) @ values).transpose(0, 1))
    return torch.cat(outputs)


def measure_model(
    shape: Shape, backend: AttentionBackend, lengths: Sequence[int], *, device: torch.device, deadline: Deadline
) -> list[ModelRate]:
    """Prompts of random ids through a model of random weights, from ids to the logits of the last row."""
    spec = ModelSpec(
        architecture="llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position=max(lengths),
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=500_000.0),
        tie_word_embeddings=False,
    )
    dtype = torch.bfloat16
    model = LlamaForCausalLM(spec, backend, dtype=dtype, device=device)
    for name, slot in model.weight_slots().items():
        slot.fill_(1.0) if slot.dim() == 1 else slot.normal_(std=0.02)
        assert slot.device.type == device.type, f"{name} is on {slot.device}"
    model.finish_loading()
    rates = []
    for length in lengths:
        if not deadline.allows(f"model, {length} tokens"):
            continue
        num_blocks = -(-length // _BLOCK_SIZE)
        cache = KVCache(spec, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=dtype, device=device)
        metadata = AttentionMetadata.build([length], [0], [list(range(num_blocks))], _BLOCK_SIZE, device=device)
        ids = torch.randint(shape.vocab_size, (length,), device=device)
        positions = torch.arange(length, device=device)
        last = torch.tensor([length - 1], device=device)

        def prefill(
            ids: torch.Tensor = ids,
            positions: torch.Tensor = positions,
            cache: KVCache = cache,
            metadata: AttentionMetadata = metadata,
            last: torch.Tensor = last,
        ) -> torch.Tensor:
            prepared = backend.prepare(metadata, dtype=dtype)
            return model.compute_logits(model.forward(ids, positions, cache, prepared, last))

        with torch.inference_mode():
            seconds = median_seconds(prefill, device, 5)
        flops = 2.0 * length * (model.num_parameters - 2 * shape.vocab_size * shape.hidden_size)
        flops += shape.num_layers * attention_flops(shape, length)
        rates.append(
            ModelRate(
                backend=backend.name,
                num_tokens=length,
                tokens_per_s=length / seconds,
                ttft_ms=1e3 * seconds,
                tflops=flops / seconds / 1e12,
            )
        )
    return rates


def attention_flops(shape: Shape, num_tokens: int) -> float:
    """Of one layer's causal half: two products of ``num_tokens * (num_tokens + 1) / 2`` scores."""
    return 4.0 * shape.num_heads * shape.head_dim * num_tokens * (num_tokens + 1) / 2


def run(
    console: Console,
    shape: Shape,
    backends: Sequence[AttentionBackend],
    *,
    device: torch.device,
    lengths: Sequence[int],
    decodes: Sequence[tuple[int, int]],
    limit_s: float,
    num_rounds: int,
) -> GpuReport:
    """Measure everything and print it as it comes; ``decodes`` are batch sizes and contexts."""
    torch.manual_seed(0)
    dtype, deadline = torch.bfloat16, Deadline(limit_s)
    errors = check(shape, backends, device, num_tokens=min(1024, max(lengths)))
    product, copied = measure_ceilings(shape.ceiling_size, device, num_rounds)
    console.print(f"bf16 product {product:,.1f} TFLOP/s, copy {copied:,.0f} GB/s")
    prefill, decode = [], []
    for length in lengths:
        for backend in backends:
            if deadline.allows(f"prefill, {length} tokens, {backend.name}"):
                load = Load(shape, (length,), (0,), device=device, dtype=dtype)
                seconds = median_seconds(load.attend(backend), device, num_rounds)
                rate = attention_flops(shape, length) / seconds / 1e12
                prefill.append(
                    PrefillRate(backend=backend.name, num_tokens=length, tflops=rate, share_of_product=rate / product)
                )
                console.print(f"prefill {length:,}: {backend.name} {rate:,.1f} TFLOP/s, {rate / product:.0%}")
    for batch_size, context in decodes:
        for backend in backends:
            if deadline.allows(f"decode, {batch_size} x {context}, {backend.name}"):
                load = Load(shape, (1,) * batch_size, (context,) * batch_size, device=device, dtype=dtype)
                seconds = median_seconds(load.attend(backend), device, num_rounds)
                num_bytes = 2.0 * batch_size * (context + 1) * shape.num_kv_heads * shape.head_dim * dtype.itemsize
                bandwidth = num_bytes / seconds / 1e9
                decode.append(
                    DecodeRate(
                        backend=backend.name,
                        batch_size=batch_size,
                        num_context_tokens=context,
                        gb_per_s=bandwidth,
                        share_of_copy=bandwidth / copied,
                    )
                )
                console.print(f"decode {batch_size} x {context:,}: {backend.name} {bandwidth:,.0f} GB/s")
    models = []
    if deadline.allows("model"):
        models = measure_model(shape, backends[0], lengths, device=device, deadline=deadline)
    for model in models:
        console.print(f"model {model.num_tokens:,}: {model.tokens_per_s:,.0f} tokens/s, TTFT {model.ttft_ms:,.1f} ms")
    return GpuReport(
        manifest=make_machine_manifest(settings=msgspec.to_builtins(shape), seed=0),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        product_tflops=product,
        copy_gb_per_s=copied,
        error_over_plain=errors,
        prefill=prefill,
        decode=decode,
        model=models,
        skipped=deadline.skipped,
    )


def available_backends(device: torch.device) -> list[AttentionBackend]:
    """Those of ``BACKENDS`` that this machine has, fastest first."""
    found = []
    for name in BACKENDS:
        try:
            found.append(get_attention_backend(name, device=device, dtype=torch.bfloat16))
        except ValueError:
            continue
    return found


@click.command()
@click.option("--length", "lengths", multiple=True, type=click.IntRange(min=16), help="Prompt length; several times.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--limit-s", type=click.FloatRange(min=1), default=420.0, show_default=True, help="Begin nothing after.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
def main(lengths: tuple[int, ...], rounds: int, limit_s: float, output: Path | None) -> None:
    """Measure the GPU kernels."""
    if not torch.cuda.is_available():
        raise click.ClickException("this bench needs a CUDA device, and torch sees none")
    device = torch.device("cuda")
    result = run(
        Console(stderr=True),
        Shape(),
        available_backends(device),
        device=device,
        lengths=lengths or (2048, 8192, 16384),
        decodes=((1, 8192), (8, 8192), (64, 4096)),
        limit_s=limit_s,
        num_rounds=rounds,
    )
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(encode_report(result))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
