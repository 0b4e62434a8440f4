"""What the command line prints: tables of steps and ranks, problems, notes; needs rich.

Invariant: numbers stand to the right and no row is wrapped, whatever the width of the terminal.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rl_schedule.invariants import Problem
from rl_schedule.plan import SchedulePlan
from rl_schedule.request import ScheduleRequest
from rl_schedule.study.simulation import StepTiming

__all__ = ["empty_table", "print_notes", "print_problems", "print_ranks", "print_steps"]

_SHOWN_RANKS = 16
"""Ranks printed of each step; of more, the slowest and the fastest half of as many."""


def empty_table(title: str, *columns: str) -> Table:
    """Return an empty table: numbers to the right, words to the left, nothing wrapped."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    return table


def print_steps(
    console: Console, planned: SchedulePlan, timings: list[StepTiming], *, seconds: bool
) -> None:
    """Print one row per step, then the bounds of the whole plan."""
    table = empty_table(
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


def print_ranks(
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
        table = empty_table(
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


def print_problems(console: Console, planned: SchedulePlan, problems: Sequence[Problem]) -> None:
    """Print what `check` found, and what it could not check."""
    for problem in problems:
        console.print(f"[red]{problem.promise}[/] {problem.message}", highlight=False)
    if planned.settings["cost"]["kind"] == "custom":
        console.print("P10 was not checked: what samples cost is not in the document")
    if not problems:
        console.print(
            f"P1-P13 hold for {planned.sample_positions.size} samples; digest"
            f" {planned.digest[:12]}",
            highlight=False,
        )


def print_notes(console: Console, planned: SchedulePlan, html: Path | None) -> None:
    """Print what was dropped or is oversized, the time, the digest, and where the picture is."""
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
