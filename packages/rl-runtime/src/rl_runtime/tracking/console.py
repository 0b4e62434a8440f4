"""What a person sees of a run: its progress, a line per step, and the curve at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["Display"]

_log = logging.getLogger(__name__)

_STEP_LINE = {
    "rollout/reward_mean": "reward",
    "train/loss": "loss",
    "train/grad_norm": "grad",
    "train/clip_fraction": "clip",
    "train/entropy": "entropy",
    "train/log_prob_gap": "gap",
    "rollout/response_tokens_mean": "tokens",
    "rollout/kept_set_mean": "kept",
}
"""Metrics of a step's line, and their short names there."""


class Display:
    """One progress display: a row for the stage that is under way, lines printed above it."""

    def __init__(self, console: Console | None = None) -> None:
        """Write to standard output unless a console is given."""
        self.console = console or Console(highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[phase]}"),
            console=self.console,
            transient=True,
        )
        self._rows: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop drawing."""
        self._progress.stop()

    def row(self, name: str, *, total: int | None) -> None:
        """Add a row of `total` units; None: no number is known."""
        self._rows[name] = self._progress.add_task(name, total=total, phase="")

    def update(self, name: str, *, advance: int = 0, phase: str = "") -> None:
        """Move a row on and say what it is doing."""
        self._progress.update(self._rows[name], advance=advance, phase=phase)

    def finish(self, name: str) -> None:
        """Take a row away."""
        self._progress.remove_task(self._rows.pop(name))

    def print(self, text: str) -> None:
        """Print a line above the display, and log it."""
        _log.info(text)
        self._progress.console.print(text, soft_wrap=True)

    def step_line(
        self,
        *,
        batch: int,
        num_batches: int,
        step: int,
        num_steps: int,
        metrics: Mapping[str, float | None],
    ) -> None:
        """Print the line of one optimizer step; batches and steps of a batch count from 0."""
        values = [
            f"{label} {metrics[name]:.3g}"
            for name, label in _STEP_LINE.items()
            if metrics.get(name) is not None
        ]
        place = f"batch {batch + 1:>3}/{num_batches}" + (
            f" step {step + 1}/{num_steps}" if num_steps > 1 else ""
        )
        self.print(f"{place}  " + "  ".join(values))

    def curve(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Draw reward and exact match over batches in the terminal; evaluations as points."""
        import plotext

        reward, exact = (
            [(line["batch"], line[name]) for line in lines if name in line]
            for name in ("rollout/reward_mean", "eval/exact_match")
        )
        if not reward:
            return
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plot_size(min(self.console.width, 100), 18)
        plotext.title("reward (line) and held-out exact match (points) over batches")
        plotext.plot(*zip(*reward, strict=True), marker="braille", label="reward")
        if exact:
            plotext.scatter(*zip(*exact, strict=True), marker="x", label="exact match")
        plotext.ylim(0, 1)
        self.console.print(plotext.uncolorize(plotext.build()), markup=False, highlight=False)
