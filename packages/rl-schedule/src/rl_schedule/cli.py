"""The command line `rl-schedule`: plan, compare, check; with `tables`, what needs typer and rich.

Exit codes: 0 fine, 1 problems found (a broken promise, data that a chosen policy refuses), 2
unusable input. A reader that goes away (`| head`) ends it as it ends other tools, by SIGPIPE.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

from rl_schedule.contract_header import producer
from rl_schedule.cost import CostModel, QuadraticCost, TransformerCost
from rl_schedule.errors import InfeasibleScheduleError, ScheduleError, UnsupportedContractError
from rl_schedule.invariants import check_plan
from rl_schedule.limited_step import padded_costs
from rl_schedule.plan import SchedulePlan
from rl_schedule.request import Balance, OnMisaligned, OnOversized, OnTrailing, ScheduleRequest
from rl_schedule.schedule import plan_schedule
from rl_schedule.study.batch_file import ACCEPTED_NAMES, Batch, read_batch
from rl_schedule.study.comparison import compare_methods
from rl_schedule.study.render import render_html
from rl_schedule.study.simulation import ClusterTiming, StepTiming, simulate_plan
from rl_schedule.tables import (
    empty_table,
    print_notes,
    print_problems,
    print_ranks,
    print_steps,
)

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
)

LengthsFile = Annotated[
    Path,
    typer.Argument(
        metavar="LENGTHS",
        help=f"CSV, JSON lines, JSON or Parquet. Columns are {ACCEPTED_NAMES}; others are not"
        " used, and named on standard error.",
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


TensorRanks = Annotated[
    int, typer.Option("--tp", min=1, help="Tensor-parallel ranks, for the simulated time.")
]
Stages = Annotated[
    int, typer.Option("--pp", min=1, help="Pipeline stages, for the simulated time.")
]
Chunks = Annotated[int, typer.Option("--vpp", min=1, help="Virtual pipeline chunks per stage.")]
PipelineGroup = Annotated[
    int | None, typer.Option(min=1, help="Micro-batches per chunk turn; pp by default.")
]
StaticSize = Annotated[
    int | None, typer.Option(min=1, help="Static packing: samples per micro-batch.")
]
BatchSizes = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]", help="Rollouts per step, or a list of them; all in one step by default."
    ),
]
Splitter = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="fixed, sizes, all or package.module:name; by the size if left out."
    ),
]
MostSamples = Annotated[
    int | None, typer.Option(min=1, help="Dynamic packing: samples per micro-batch at most.")
]
EqualSamples = Annotated[
    bool, typer.Option("--equal-samples", help="As many samples on every rank.")
]
PadToLongest = Annotated[
    bool,
    typer.Option("--pad-to-longest", help="Each micro-batch is padded to its longest sample."),
]
Levelled = Annotated[Balance, typer.Option(help="What to level over ranks and slots.")]
Slack = Annotated[str, typer.Option(help="0, a fraction, or auto.")]
Extra = Annotated[
    Literal["auto", "0"],
    typer.Option(help="One more micro-batch per rank where that levels the ranks, or none."),
]
Speed = Annotated[
    float, typer.Option(min=0.001, help="TFLOP/s one GPU achieves, for the simulated time.")
]
SyncSeconds = Annotated[
    float, typer.Option(min=0.0, help="Gradient reduction and optimizer per step.")
]
Page = Annotated[Path | None, typer.Option(help="Write a self-contained picture.")]


@app.command()
def plan(
    lengths: LengthsFile,
    dp: Ranks,
    cp: ContextRanks = 1,
    tp: TensorRanks = 1,
    pp: Stages = 1,
    vpp: Chunks = 1,
    pipeline_group: PipelineGroup = None,
    max_tokens_per_gpu: TokenLimit = None,
    micro_batch_size: StaticSize = None,
    global_batch_size: BatchSizes = None,
    splitter: Splitter = None,
    max_samples_per_micro_batch: MostSamples = None,
    equal_samples: EqualSamples = False,
    pad_to_longest: PadToLongest = False,
    balance: Levelled = "flops",
    rank_slack: Slack = "0",
    extra_micro_batches: Extra = "auto",
    model: ModelFile = None,
    tflops: Speed = 400.0,
    sync_seconds: SyncSeconds = 0.0,
    on_oversized: Annotated[OnOversized, typer.Option()] = "alone",
    on_misaligned: Annotated[OnMisaligned, typer.Option()] = "split_then_filler",
    on_trailing: Annotated[OnTrailing, typer.Option()] = "drop",
    pad_to_multiple: Padding = None,
    as_json: AsJson = False,
    html: Page = None,
) -> None:
    """Dry-run a schedule: tables per step and rank with the simulated time, JSON, or a picture."""
    batch = _read_lengths(lengths)
    cost = _cost_model(model)
    sizes = _sizes(global_batch_size)
    by_size = "all" if sizes is None else "fixed" if isinstance(sizes, int) else "sizes"
    request = ScheduleRequest(
        **batch.columns(),
        global_batch_size=[sizes] if splitter == "sizes" and isinstance(sizes, int) else sizes,
        splitter=by_size if splitter is None else splitter,
        max_samples_per_micro_batch=max_samples_per_micro_batch,
        equal_samples=equal_samples,
        pad_to_longest=pad_to_longest,
        dp_size=dp,
        cp_size=cp,
        vpp_size=vpp,
        microbatch_group_size_per_vp_stage=(pipeline_group or pp) if vpp > 1 else 1,
        max_tokens_per_gpu=max_tokens_per_gpu,
        micro_batch_size=micro_batch_size,
        balance=balance,
        rank_slack="auto" if rank_slack == "auto" else _fraction(rank_slack),
        extra_micro_batches="auto" if extra_micro_batches == "auto" else 0,
        cost=cost if batch.sample_costs is None or model else None,
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
    spent = request.costs_of(planned.sample_positions)
    if pad_to_longest:
        spent = padded_costs(planned.placed_rows, spent)
    timings = simulate_plan(planned, request.padded_lengths, lambda _: spent, timing)
    if html is not None:
        _write_page(html, lengths.name, planned, request, timings, seconds=model is not None)
    if as_json:
        sys.stdout.write(json.dumps(planned.to_document()) + "\n")
        return
    console = Console()
    print_steps(console, planned, timings, seconds=model is not None)
    print_ranks(console, planned, request, timings)
    print_notes(console, planned, html)


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
    batch = _read_lengths(lengths)
    request = ScheduleRequest(
        # The plain methods know no pairs, and all methods get the same samples.
        **{**batch.columns(), "keep_together": None},
        global_batch_size=None,
        splitter="all",
        dp_size=dp,
        cp_size=cp,
        max_tokens_per_gpu=max_tokens_per_gpu,
        cost=_cost_model(model) if batch.sample_costs is None or model else None,
        pad_to_multiple=_padding(pad_to_multiple, cp),
    )
    rows = compare_methods(request)
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")
        return
    table = empty_table(
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
    max_tokens_per_gpu: Annotated[
        int | None, typer.Option(min=1, help="Your cap, whatever the plan says it was made for.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every promise of a plan against the lengths it is for; exit 1 if one is broken."""
    try:
        planned = SchedulePlan.from_document(_read_json(plan_file))
    except UnsupportedContractError as error:
        raise ScheduleError(f"{plan_file}: {error}") from error
    settings = dict(planned.settings)
    foreign_cap = max_tokens_per_gpu not in (None, settings["max_tokens_per_gpu"])
    if foreign_cap:
        settings |= {"max_tokens_per_gpu": max_tokens_per_gpu, "micro_batch_size": None}
    batch = _read_lengths(lengths)
    request = ScheduleRequest.from_settings(settings, **batch.columns())
    problems = check_plan(planned, request)
    if foreign_cap or settings["cost"]["kind"] == "custom":
        # With another cap or another cost P10 is about another plan.
        problems = [problem for problem in problems if problem.promise != "P10"]
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
        print_problems(Console(), planned, problems)
    if problems:
        raise typer.Exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rl-schedule {producer()['version']}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Which samples run where and when, without a GPU."""
    del version


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; errors, also of a full disk, become one line on stderr."""
    if arguments is None and hasattr(signal, "SIGPIPE"):
        # Python turns a closed pipe into an error; other tools end by the signal.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        try:
            app(args=None if arguments is None else list(arguments))
        finally:
            # Here, not at the end of the process, where a full disk could not be told any more.
            sys.stdout.flush()
    except OSError as error:
        _discard_stdout()
        sys.stderr.write(f"rl-schedule: the output cannot be written: {error.strerror or error}\n")
        raise SystemExit(2) from None
    except (ScheduleError, UnsupportedContractError) as error:
        sys.stderr.write(f"rl-schedule: {error}\n")
        raise SystemExit(1 if isinstance(error, InfeasibleScheduleError) else 2) from None
    raise SystemExit(0)  # pragma: no cover - typer always exits


def _discard_stdout() -> None:
    """Let what is left in the buffer go nowhere: Python would fail to write it once more."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        # Not a file of the system, such as a test's; there is nothing to redirect.
        return


def _read_lengths(path: Path) -> Batch:
    """Read a batch, and say on standard error which of the file's columns nothing reads."""
    batch = read_batch(path)
    if batch.unused:
        sys.stderr.write(
            f"rl-schedule: {path}: not used: {', '.join(batch.unused)}; columns are"
            f" {ACCEPTED_NAMES}\n"
        )
    return batch


def _sizes(text: str | None) -> int | list[int] | None:
    """Return rollouts per step: one number, a list of them, or None."""
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ScheduleError(
            f"--global-batch-size must be an integer or integers with commas, got {text!r}"
        ) from error
    return sizes[0] if len(sizes) == 1 else sizes


def _cost_model(model: Path | None) -> CostModel:
    return QuadraticCost() if model is None else TransformerCost.from_hf_config(_read_json(model))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
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
