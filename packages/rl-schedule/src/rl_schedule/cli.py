"""The command line `rl-schedule`: plan, compare, check; the only module that needs typer and rich.

Exit codes: 0 fine, 1 problems found (a broken promise, data that a chosen policy refuses), 2
unusable input.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rl_schedule.cost import CostModel, QuadraticCost, TransformerCost
from rl_schedule.errors import InfeasibleScheduleError, ScheduleError, UnsupportedContractError
from rl_schedule.invariants import Problem, check_plan
from rl_schedule.plan import SchedulePlan
from rl_schedule.request import Balance, OnMisaligned, OnOversized, OnTrailing, ScheduleRequest
from rl_schedule.schedule import plan_schedule
from rl_schedule.study.batch_file import read_batch
from rl_schedule.study.comparison import compare_methods
from rl_schedule.study.render import render_html
from rl_schedule.study.simulation import ClusterTiming, StepTiming, simulate_plan

__all__ = ["app", "main"]

_SHOWN_RANKS = 16
"""Ranks printed of each step; of more, the slowest and the fastest half of as many."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Which samples run where and when, without a GPU.",
)

LengthsFile = Annotated[
    Path,
    typer.Argument(
        metavar="LENGTHS", help="JSON lines, JSON or Parquet with total lengths and rollout ids."
    ),
]
Ranks = Annotated[int, typer.Option("--dp", min=1, help="Data-parallel ranks.")]
ContextRanks = Annotated[
    int, typer.Option("--cp", min=1, help="Context-parallel ranks per micro-batch.")
]
TokenLimit = Annotated[
    int | None, typer.Option(min=1, help="Dynamic packing: tokens per GPU and micro-batch.")
]
ModelFile = Annotated[
    Path | None,
    typer.Option(
        "--model", help="Hugging Face config.json; without it a 7B model in relative units."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Padding = Annotated[
    int | None,
    typer.Option(min=1, help="Pad each sequence to this; 2 * cp by default when cp > 1."),
]


@app.command()
def plan(
    lengths: LengthsFile,
    dp: Ranks,
    cp: ContextRanks = 1,
    tp: Annotated[
        int, typer.Option("--tp", min=1, help="Tensor-parallel ranks, for the simulated time.")
    ] = 1,
    pp: Annotated[
        int, typer.Option("--pp", min=1, help="Pipeline stages, for the simulated time.")
    ] = 1,
    vpp: Annotated[
        int, typer.Option("--vpp", min=1, help="Virtual pipeline chunks per stage.")
    ] = 1,
    pipeline_group: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches per chunk turn; pp by default.")
    ] = None,
    max_tokens_per_gpu: TokenLimit = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Static packing: samples per micro-batch.")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rollouts per step; all in one step by default.")
    ] = None,
    balance: Annotated[Balance, typer.Option(help="What to level over ranks and slots.")] = "flops",
    rank_slack: Annotated[str, typer.Option(help="0, a fraction, or auto.")] = "0",
    model: ModelFile = None,
    tflops: Annotated[
        float, typer.Option(min=0.001, help="TFLOP/s one GPU achieves, for the simulated time.")
    ] = 400.0,
    sync_seconds: Annotated[
        float, typer.Option(min=0.0, help="Gradient reduction and optimizer per step.")
    ] = 0.0,
    on_oversized: Annotated[OnOversized, typer.Option()] = "alone",
    on_misaligned: Annotated[OnMisaligned, typer.Option()] = "split_then_filler",
    on_trailing: Annotated[OnTrailing, typer.Option()] = "drop",
    pad_to_multiple: Padding = None,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained picture.")] = None,
) -> None:
    """Dry-run a schedule: tables per step and rank with the simulated time, JSON, or a picture."""
    batch = read_batch(lengths)
    cost = _cost_model(model)
    request = ScheduleRequest(
        total_lengths=batch.total_lengths,
        rollout_ids=batch.rollout_ids,
        global_batch_size=global_batch_size,
        splitter="all" if global_batch_size is None else "fixed",
        dp_size=dp,
        cp_size=cp,
        vpp_size=vpp,
        microbatch_group_size_per_vp_stage=(pipeline_group or pp) if vpp > 1 else 1,
        max_tokens_per_gpu=max_tokens_per_gpu,
        micro_batch_size=micro_batch_size,
        balance=balance,
        rank_slack="auto" if rank_slack == "auto" else _fraction(rank_slack),
        cost=cost,
        on_oversized=on_oversized,
        on_misaligned=on_misaligned,
        on_trailing=on_trailing,
        pad_to_multiple=_padding(pad_to_multiple, cp),
    )
    timing = ClusterTiming(
        cost_per_second=tflops * 1e12 if model else 1.0,
        gpus_per_stage=tp * cp,
        pp_size=pp,
        vpp_size=vpp,
        pipeline_group=pipeline_group,
        sync_seconds=sync_seconds,
    )
    planned = plan_schedule(request)
    timings = simulate_plan(planned, request.padded_lengths, cost, timing)
    if html is not None:
        _write_page(html, lengths.name, planned, request, timings, seconds=model is not None)
    if as_json:
        sys.stdout.write(json.dumps(planned.to_document()) + "\n")
        return
    console = Console()
    _print_steps(console, planned, timings, seconds=model is not None)
    _print_ranks(console, planned, request, timings)
    _print_notes(console, planned, html)


@app.command()
def compare(
    lengths: LengthsFile,
    dp: Ranks,
    max_tokens_per_gpu: Annotated[int, typer.Option(min=1, help="Tokens per GPU and micro-batch.")],
    cp: ContextRanks = 1,
    model: ModelFile = None,
    pad_to_multiple: Padding = None,
    as_json: AsJson = False,
) -> None:
    """Run all packers on the whole file as one step, side by side."""
    batch = read_batch(lengths)
    request = ScheduleRequest(
        total_lengths=batch.total_lengths,
        rollout_ids=batch.rollout_ids,
        global_batch_size=None,
        splitter="all",
        dp_size=dp,
        cp_size=cp,
        max_tokens_per_gpu=max_tokens_per_gpu,
        cost=_cost_model(model),
        pad_to_multiple=_padding(pad_to_multiple, cp),
    )
    rows = compare_methods(request)
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")
        return
    table = _table(
        f"{lengths.name}: {dp} ranks, {request.token_cap:,} tokens per micro-batch; micro-batches"
        " per rank, max / mean, slots / ideal",
        *("method", "mb", "fill", "over cap", "ranks", "slots", "ms"),
    )
    for row in rows:
        table.add_row(
            row.method,
            str(row.micro_batches),
            f"{row.fill:.1%}",
            str(row.over_cap),
            f"{row.rank_imbalance:.4f}",
            f"{row.slot_imbalance:.4f}",
            f"{row.seconds * 1e3:.1f}",
        )
    Console().print(table)


@app.command()
def check(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A schedule-plan.v1 document.")],
    lengths: LengthsFile,
    as_json: AsJson = False,
) -> None:
    """Check every promise of a plan against the lengths it is for; exit 1 if one is broken."""
    planned = SchedulePlan.from_document(_read_json(plan_file))
    batch = read_batch(lengths)
    request = ScheduleRequest.from_settings(
        planned.settings, total_lengths=batch.total_lengths, rollout_ids=batch.rollout_ids
    )
    problems = check_plan(planned, request)
    if as_json:
        found = [
            {
                name: getattr(problem, name)
                for name in ("promise", "message", "samples", "rank", "step")
            }
            for problem in problems
        ]
        sys.stdout.write(json.dumps({"digest": planned.digest, "problems": found}) + "\n")
    else:
        _print_problems(Console(), planned, problems)
    if problems:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; errors of this package become one line on stderr."""
    try:
        app(args=None if arguments is None else list(arguments))
    except (ScheduleError, UnsupportedContractError) as error:
        sys.stderr.write(f"rl-schedule: {error}\n")
        raise SystemExit(1 if isinstance(error, InfeasibleScheduleError) else 2) from None
    raise SystemExit(0)  # pragma: no cover - typer always exits


def _cost_model(model: Path | None) -> CostModel:
    return QuadraticCost() if model is None else TransformerCost.from_hf_config(_read_json(model))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ScheduleError(f"{path}: cannot be read as JSON: {error}") from error


def _write_page(
    path: Path,
    title: str,
    planned: SchedulePlan,
    request: ScheduleRequest,
    timings: list[StepTiming],
    *,
    seconds: bool,
) -> None:
    page = render_html(planned, request, timings, title=title, seconds=seconds)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ScheduleError(
            f"--html {path}: cannot be written: {error.strerror or error}"
        ) from error


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ScheduleError(f"--rank-slack must be a fraction or auto, got {text!r}") from error


def _padding(given: int | None, cp: int) -> int:
    # Zig-zag context parallelism cuts each sequence into 2 * cp equal chunks.
    return given if given is not None else (2 * cp if cp > 1 else 1)


def _table(title: str, *columns: str) -> Table:
    """Return an empty table: numbers to the right, words to the left, nothing wrapped."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    return table


def _print_steps(
    console: Console, planned: SchedulePlan, timings: list[StepTiming], *, seconds: bool
) -> None:
    """Print one row per step, then the bounds of the whole plan."""
    table = _table(
        "steps: micro-batches per rank, slowest rank / mean, slots / ideal, time (x ideal without"
        " --model) and its shares",
        *("step", "samples", "mb", "fill", "ranks", "slots"),
        *("time", "useful", "bubble", "uneven"),
    )
    for number, (step, timing) in enumerate(zip(planned.stats.steps, timings, strict=True)):
        table.add_row(
            str(number),
            f"{step.num_samples:,}",
            f"{step.micro_batches}",
            "-" if step.fill is None else f"{step.fill:.1%}",
            f"{step.rank_imbalance:.4f}",
            f"{step.slot_imbalance:.4f}",
            (
                f"{timing.seconds:.3g} s"
                if seconds
                else f"{1.0 / timing.useful_share if timing.useful_share else 1.0:.3f}x"
            ),
            *(
                f"{share:.1%}"
                for share in (timing.useful_share, timing.bubble_share, timing.imbalance_share)
            ),
        )
    console.print(table)
    stats = planned.stats
    console.print(
        f"No plan can have fewer than {stats.micro_batch_bound} micro-batches per rank, ranks below"
        f" {stats.rank_bound:.4f} (slowest / mean) or, with these ranks, slots below"
        f" {stats.slot_bound:.4f} (sum of slowest / ideal).",
        highlight=False,
    )


def _print_ranks(
    console: Console, planned: SchedulePlan, request: ScheduleRequest, timings: list[StepTiming]
) -> None:
    """Print the ranks of each step, the slowest and the fastest where there are many."""
    lengths = request.padded_lengths
    half = _SHOWN_RANKS // 2
    for number, timing in enumerate(timings):
        start = sum(planned.num_microbatches[:number])
        slots = range(start, start + planned.num_microbatches[number])
        which = ""
        shown = np.argsort(-timing.rank_seconds, kind="stable").tolist()
        if planned.dp_size > _SHOWN_RANKS:
            shown = shown[:half] + shown[-half:]
            which = f", the {half} slowest and {half} fastest of {planned.dp_size} ranks"
        table = _table(
            f"step {number}{which}; tokens per micro-batch on the right",
            *("rank", "samples", "tokens", "of slowest", "least", "median", "most"),
        )
        slowest = float(timing.rank_seconds.max()) or 1.0
        for rank in sorted(shown):
            batches = [planned.micro_batch_samples(rank, slot) for slot in slots]
            tokens = np.array([int(lengths[batch].sum()) for batch in batches])
            table.add_row(
                str(rank),
                f"{sum(batch.size for batch in batches):,}",
                f"{tokens.sum():,}",
                f"{timing.rank_seconds[rank] / slowest:.2%}",
                *(f"{int(value):,}" for value in (tokens.min(), np.median(tokens), tokens.max())),
            )
        console.print(table)


def _print_problems(console: Console, planned: SchedulePlan, problems: Sequence[Problem]) -> None:
    """Print what `check` found, and what it could not check."""
    for problem in problems:
        console.print(f"[red]{problem.promise}[/] {problem.message}", highlight=False)
    if planned.settings["cost"]["kind"] == "custom":
        console.print(
            "P10 was checked with the default cost: the plan's own cost model is not in the"
            " document"
        )
    if not problems:
        console.print(
            f"P1-P10 hold for {planned.sample_positions.size} samples; digest"
            f" {planned.digest[:12]}",
            highlight=False,
        )


def _print_notes(console: Console, planned: SchedulePlan, html: Path | None) -> None:
    if planned.dropped_samples:
        console.print(
            f"dropped: {len(planned.dropped_samples)} samples of {len(planned.dropped_rollouts)}"
            " rollouts"
        )
    if planned.oversized_samples:
        console.print(
            f"oversized: {len(planned.oversized_samples)} samples above the token cap, first"
            f" {planned.oversized_samples[:5]}"
        )
    console.print(
        f"planned in {planned.stats.wall_seconds * 1e3:.1f} ms; digest {planned.digest[:12]}",
        highlight=False,
    )
    if html is not None:
        console.print(f"picture: {html}", highlight=False)
