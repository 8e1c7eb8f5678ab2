"""``firsttoken plan``: whether separate engines for prefill and decode pay, and how many of each are needed."""

import json
import math
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineError
from engine.planner import (
    EngineSpeed,
    Layout,
    Link,
    Objectives,
    Plan,
    Workload,
    pipeline_parallel_prefill_s,
    tensor_parallel_prefill_s,
)
from engine.planner import (
    plan as make_plan,
)

DEVICES = (2, 4)


@click.command("plan")
@click.option("--model", default=ModelConfig().model, show_default=True, help="Model to measure on this machine.")
@click.option("--prompt-tokens", default="512,2048", show_default=True, help="Prompt lengths, separated by commas.")
@click.option(
    "--lengths",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with one prompt length per line, in place of --prompt-tokens.",
)
@click.option("--output-tokens", default=128.0, show_default=True, help="Mean length of an output.")
@click.option("--rate", default=1.0, show_default=True, help="Requests per second.")
@click.option("--engines", default=2, show_default=True, type=click.IntRange(1, 1024), help="Engines to lay out.")
@click.option("--gbit", type=float, help="Rate of the network in Gbit/s; default is what the loopback gives.")
@click.option("--network-latency-ms", default=0.5, show_default=True, help="One way.")
@click.option("--ttft-ms", default=1000.0, show_default=True, help="Objective: mean time to the first token.")
@click.option("--tpot-ms", default=100.0, show_default=True, help="Objective: mean time per output token.")
@click.option("--gap-ms", type=float, help="Objective: longest pause within an output; default is none.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def plan(
    model: str,
    prompt_tokens: str,
    lengths: Path | None,
    output_tokens: float,
    rate: float,
    engines: int,
    gbit: float | None,
    network_latency_ms: float,
    ttft_ms: float,
    tpot_ms: float,
    gap_ms: float | None,
    as_json: bool,
) -> None:
    """Measure this machine for some seconds, then say whether prefill and decode in separate engines pay."""
    from engine.speed_probe import probe  # late: this is where torch comes in

    text = prompt_tokens.replace(",", " ") if lengths is None else lengths.read_text(encoding="utf-8")
    try:
        workload = Workload(
            prompt_tokens=[int(word) for word in text.split()], output_tokens=output_tokens, request_rate=rate
        )
        if gbit is not None and gbit <= 0:
            raise ValueError(f"--gbit must be positive, got {gbit}")
        sample = sorted(workload.prompt_tokens)
        shown = sorted({sample[len(sample) // 4], sample[len(sample) // 2], sample[-1]})
        measured = probe(EngineConfig(model=ModelConfig(model=model)), shown)
        # What reading and checking blocks costs is a limit beside that of the network.
        software = measured.transfer_bytes_per_s
        link = Link(
            bytes_per_s=software if gbit is None else min(software, gbit * 1e9 / 8),
            latency_s=network_latency_ms / 1e3,
        )
        objectives = Objectives(ttft_ms / 1e3, tpot_ms / 1e3, math.inf if gap_ms is None else gap_ms / 1e3)
        found = make_plan(workload, measured.speed, link, measured.info, objectives, engines)
    except (ValueError, EngineError) as error:
        raise click.ClickException(str(error)) from error
    longest = min(sample[-1], measured.info.max_model_len)
    parallel = {
        str(devices): {
            "tensor_s": tensor_parallel_prefill_s(measured.speed, measured.info, longest, devices, link),
            "pipeline_s": pipeline_parallel_prefill_s(measured.speed, measured.info, longest, devices, link),
        }
        for devices in DEVICES
    }
    if as_json:
        click.echo(
            json.dumps(
                {
                    "speed": msgspec.to_builtins(measured.speed),
                    "link_bytes_per_s": link.bytes_per_s,
                    "loopback_bytes_per_s": software,
                    "plan": _finite(msgspec.to_builtins(found)),
                    "parallel_prefill": {
                        "tokens": longest,
                        "one_device_s": measured.speed.prefill_s(longest),
                        "devices": parallel,
                    },
                }
            )
        )
        return
    _print(found, objectives, link, measured.speed, longest, parallel)


def _print(
    found: Plan,
    objectives: Objectives,
    link: Link,
    speed: EngineSpeed,
    longest: int,
    parallel: dict[str, dict[str, float]],
) -> None:
    table = Table(title="mean times per layout", title_justify="left")
    for column in ("engines", "TTFT", "of it transfer", "per token", "longest gap", "strain"):
        table.add_column(column, justify="left" if column == "engines" else "right")
    layouts = [found.colocated, *([found.disaggregated] if found.disaggregated is not None else [])]
    for layout in layouts:
        strain = layout.strain(objectives)
        times = (layout.ttft_s, layout.transfer_s, layout.tpot_s, layout.gap_s)
        table.add_row(_name(layout), *map(_ms, times), f"{strain:.2f}" if math.isfinite(strain) else "overloaded")
    console = Console()
    console.print(table)
    click.echo("strain: the worst time relative to its objective; 1 or less meets them all")
    share = found.load_ratio
    click.echo(
        f"work of prefills to work of decodes: {share:.2f}" if math.isfinite(share) else "no decode is fast enough"
    )
    click.echo(
        f"fetching beats computing from {found.break_even_bytes_per_s * 8 / 1e9:.3f} Gbit/s on; "
        f"the link gives {link.bytes_per_s * 8 / 1e9:.3f}"
    )
    for devices, seconds in parallel.items():
        click.echo(
            f"{longest} tokens over {devices} such devices and links: one {_ms(speed.prefill_s(longest))}, "
            f"tensor parallel {_ms(seconds['tensor_s'])}, pipeline {_ms(seconds['pipeline_s'])}"
        )
    click.echo(f"separate engines {'pay' if found.pays else 'do not pay'}")


def _name(layout: Layout) -> str:
    if layout.num_prefill == 0:
        return f"{layout.num_decode} for both"
    return f"{layout.num_prefill} prefill + {layout.num_decode} decode"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if math.isfinite(seconds) else "never"


def _finite(value: object) -> object:
    """JSON has no infinity: ``None`` stands for never."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
