"""Full prompt against reduced prompt on the same questions: tokens, TTFT, answer.

    python -m eval.benches.bench_side_by_side nq.jsonl.gz --cases 20 --output eval/results/side_by_side.json

Every prompt is computed without help from the prefix cache: full and reduced prompts are sent as two tenants, whose
caches are apart, every case is sent once, and cases share nothing but the system prompt, whose few blocks show in the
column of cached tokens. Which of the two goes first alternates from case to case. One more case of the file, not
reported, warms both paths up.

The result holds figures, ids and the model's answers; texts of the data set stay out of it.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.datasets import Dataset, read_dataset
from eval.errors import ContextLengthError, EvalError
from eval.gateway import DEMO_KEYS, GatewayClient, PromptRequest
from eval.intervals import compare, percentile
from eval.launcher import started_gateway
from eval.manifest import Manifest, make_manifest
from eval.prompts import SYSTEM_PROMPT, bypassing, full_request
from eval.recall import answer_record, can_be_answered
from eval.records import AnswerRecord, Comparison, encode_report
from eval.report import milliseconds
from eval.samples import Case
from eval.scoring import SearchText, answer_score

FULL = "full"
REDUCED = "reduced"


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One question, answered from both prompts."""

    id: str
    num_passages: int
    first: str
    """Which of the two was sent first."""
    full: AnswerRecord
    reduced: AnswerRecord
    full_contains: bool
    """The answer contains an accepted one."""
    reduced_contains: bool


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of prompt over the pairs whose full prompt fits into the window."""

    prompt_tokens_median: float
    prompt_tokens_p90: float
    ttft_ms_median: float
    ttft_ms_p90: float
    cached_tokens_max: int
    num_contains: int


class SideBySide(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench."""

    manifest: Manifest
    num_cases: int
    num_does_not_fit: int
    """Cases whose full prompt is longer than the window; they are in ``pairs``, not in the sides and ratios."""
    full: Side
    reduced: Side
    prompt_tokens_ratio: float
    """Full median over reduced median; above 1 is better for reduced, as in all ratios."""
    ttft_ratio_median: float
    ttft_ratio_p90: float
    ttft_ratio_per_case_median: float
    """Median of the ratios case by case."""
    contains: Comparison
    """Reduced minus full."""
    pairs: list[Pair]


def measure_pair(client: GatewayClient, full_client: GatewayClient, case: Case, options: "Options", place: int) -> Pair:
    """Answers one case from both prompts; the order follows ``place``."""
    request = full_request(
        case, policy=options.policy, max_input_tokens=options.max_input_tokens, max_tokens=options.max_tokens
    )
    order = (FULL, REDUCED) if place % 2 == 0 else (REDUCED, FULL)
    answers = {
        side: _answer(full_client, bypassing(request), side) if side == FULL else _answer(client, request, side)
        for side in order
    }
    return Pair(
        id=case.id,
        num_passages=len(case.chunks),
        first=order[0],
        full=answers[FULL],
        reduced=answers[REDUCED],
        full_contains=answer_score(case, SearchText(answers[FULL].text)) == 1.0,
        reduced_contains=answer_score(case, SearchText(answers[REDUCED].text)) == 1.0,
    )


def _answer(client: GatewayClient, request: PromptRequest, side: str) -> AnswerRecord:
    try:
        return answer_record(side, client.stream(request))
    except ContextLengthError:
        return AnswerRecord(arm=side, does_not_fit=True)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the bench."""

    policy: str | None = None
    max_input_tokens: int | None = None
    """Most prompt tokens of the reduced prompt; by default the gateway decides."""
    max_tokens: int = 32
    seed: int = 0


def summarise(manifest: Manifest, pairs: Sequence[Pair], seed: int) -> SideBySide:
    """Medians, p90 and ratios. Raises EvalError where no full prompt fits, for there is nothing to compare then."""
    fitting = [pair for pair in pairs if not pair.full.does_not_fit and not pair.reduced.does_not_fit]
    timed = [pair for pair in fitting if pair.full.ttft_ms is not None and pair.reduced.ttft_ms is not None]
    if not timed:
        raise EvalError(f"none of {len(pairs)} cases has an answer from both prompts: nothing to compare")
    full = _side([pair.full for pair in timed], sum(pair.full_contains for pair in timed))
    reduced = _side([pair.reduced for pair in timed], sum(pair.reduced_contains for pair in timed))
    ratios = [_ttft(pair.full) / _ttft(pair.reduced) for pair in timed]
    paired = compare(
        [float(pair.reduced_contains) for pair in fitting], [float(pair.full_contains) for pair in fitting], seed=seed
    )
    return SideBySide(
        manifest=manifest,
        num_cases=len(pairs),
        num_does_not_fit=len(pairs) - len(fitting),
        full=full,
        reduced=reduced,
        prompt_tokens_ratio=full.prompt_tokens_median / reduced.prompt_tokens_median,
        ttft_ratio_median=full.ttft_ms_median / reduced.ttft_ms_median,
        ttft_ratio_p90=full.ttft_ms_p90 / reduced.ttft_ms_p90,
        ttft_ratio_per_case_median=percentile(ratios, 0.5),
        contains=Comparison(
            metric="answer containment",
            arm=REDUCED,
            baseline=FULL,
            num_pairs=paired.num_pairs,
            difference=paired.difference,
            low=paired.interval.low,
            high=paired.interval.high,
            only_arm=paired.only_arm,
            only_baseline=paired.only_baseline,
            mcnemar_p=paired.mcnemar_p,
        ),
        pairs=list(pairs),
    )


def _ttft(answer: AnswerRecord) -> float:
    assert answer.ttft_ms is not None, "only pairs with both times are compared"
    return answer.ttft_ms


def _side(answers: Sequence[AnswerRecord], num_contains: int) -> Side:
    tokens = [answer.prompt_tokens for answer in answers]
    times = [_ttft(answer) for answer in answers]
    return Side(
        prompt_tokens_median=percentile(tokens, 0.5),
        prompt_tokens_p90=percentile(tokens, 0.9),
        ttft_ms_median=percentile(times, 0.5),
        ttft_ms_p90=percentile(times, 0.9),
        cached_tokens_max=max(answer.cached_tokens for answer in answers),
        num_contains=num_contains,
    )


def print_side_by_side(console: Console, result: SideBySide) -> None:
    """The cases, then the summary."""
    table = Table(title=f"{result.manifest.data.name}: full against reduced prompt", title_justify="left")
    table.add_column("case")
    for heading in ("tokens", "TTFT ms", "answer"):
        table.add_column(heading, justify="left" if heading == "answer" else "right")
    for pair in result.pairs:
        for name, answer, contains in (
            (pair.id, pair.full, pair.full_contains),
            ("  reduced", pair.reduced, pair.reduced_contains),
        ):
            text = "(does not fit)" if answer.does_not_fit else " ".join(answer.text.split())
            mark = "✓ " if contains else "✗ "
            table.add_row(name, f"{answer.prompt_tokens:,}", milliseconds(answer.ttft_ms), Text(mark + text))
    console.print(table)
    full, reduced = result.full, result.reduced
    summary = Table(title=f"Summary of {result.contains.num_pairs} pairs", title_justify="left")
    for heading in ("", "full", "reduced", "ratio"):
        summary.add_column(heading, justify="left" if not heading else "right")
    rows = (
        ("prompt tokens, median", full.prompt_tokens_median, reduced.prompt_tokens_median, result.prompt_tokens_ratio),
        ("TTFT ms, median", full.ttft_ms_median, reduced.ttft_ms_median, result.ttft_ratio_median),
        ("TTFT ms, p90", full.ttft_ms_p90, reduced.ttft_ms_p90, result.ttft_ratio_p90),
    )
    for name, left, right, ratio in rows:
        summary.add_row(name, f"{left:,.0f}", f"{right:,.0f}", f"{ratio:.1f}")
    summary.add_row("answer contains an accepted one", str(full.num_contains), str(reduced.num_contains), "")
    summary.add_row("cached tokens, most", str(full.cached_tokens_max), str(reduced.cached_tokens_max), "")
    console.print(summary)
    paired = result.contains
    console.print(
        f"containment, reduced - full: {100 * paired.difference:+.1f} points "
        f"[{100 * paired.low:+.1f}, {100 * paired.high:+.1f}], McNemar p {paired.mcnemar_p:.3g}; "
        f"{result.num_does_not_fit} full prompts do not fit into the window"
    )


def _run(console: Console, dataset: Dataset, options: Options, url: str | None) -> SideBySide:
    if url is None:
        with console.status("starting the gateway") as status, started_gateway(example=True) as started:
            status.stop()
            return _measure(console, dataset, options, started, started_gateway_here=True)
    return _measure(console, dataset, options, url, started_gateway_here=False)


def _measure(
    console: Console, dataset: Dataset, options: Options, url: str, *, started_gateway_here: bool
) -> SideBySide:
    *cases, spare = dataset.cases
    with (
        GatewayClient(url=url, api_key=DEMO_KEYS[0]) as client,
        GatewayClient(url=url, api_key=DEMO_KEYS[1]) as full_client,
        console.status("warming up") as status,
    ):
        served = client.models()[0]
        measure_pair(client, full_client, spare, options, 0)
        pairs = []
        for place, case in enumerate(cases):
            status.update(f"{place + 1} of {len(cases)}: {case.id}, {len(case.chunks)} passages, both prompts")
            pairs.append(measure_pair(client, full_client, case, options, place))
    manifest = make_manifest(
        dataset=replace(dataset, cases=cases),
        settings={"system_prompt": SYSTEM_PROMPT, "temperature": 0, **msgspec.to_builtins(options)},
        seed=options.seed,
        model=served.id,
        max_model_len=served.max_model_len,
        started_gateway=started_gateway_here,
    )
    return summarise(manifest, pairs, options.seed)


@click.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--cases", "num_cases", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--max-input-tokens", type=click.IntRange(min=1), help="Of the reduced prompt.")
@click.option("--policy", help="Policy of the reduction.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Of an answer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the interval.")
@click.option("--url", help="A running gateway with the demo tenants; without it one is started for the run.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
def main(
    data: Path,
    num_cases: int,
    max_input_tokens: int | None,
    policy: str | None,
    max_tokens: int,
    seed: int,
    url: str | None,
    output: Path | None,
) -> None:
    """Full against reduced prompt on the first questions of DATA."""
    console = Console()
    options = Options(policy=policy, max_input_tokens=max_input_tokens, max_tokens=max_tokens, seed=seed)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)  # before the run, so that a wrong folder does not cost one
    try:
        dataset = read_dataset(data, limit=num_cases + 1)
        if len(dataset.cases) < 2 or not all(can_be_answered(case) and case.chunks for case in dataset.cases):
            raise EvalError(f"{dataset.name}: needs two cases or more, all with passages and short answers")
        result = _run(console, dataset, options, url)
    except EvalError as error:
        raise click.ClickException(str(error)) from None
    print_side_by_side(console, result)
    if output is not None:
        output.write_bytes(encode_report(result))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
