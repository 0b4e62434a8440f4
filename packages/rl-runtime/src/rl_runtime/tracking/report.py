"""`report.html` of a run: one page that needs no network."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from rl_runtime.tracking.tracker import read_metrics

__all__ = ["write_report"]

_CHARTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Learning curve",
        "reward and exact match of the training batches; points are held-out evaluations",
        (
            ("rollout/reward_mean", "reward"),
            ("rollout/exact_match_mean", "exact match"),
            ("eval/reward_mean", "held-out reward"),
            ("eval/exact_match", "held-out exact match"),
        ),
    ),
    ("Response length", "tokens per rollout", (("rollout/response_tokens_mean", "tokens"),)),
    (
        "Kept set",
        "ids that the sampler could pick, mean over trained tokens",
        (("rollout/kept_set_mean", "ids"),),
    ),
    (
        "Log-prob gap",
        "mean |trainer - engine| over trained tokens; where recomputed, before the first step",
        (("train/log_prob_gap", "nats"),),
    ),
    ("Loss", "policy loss of each step", (("train/loss", "loss"),)),
    ("Gradient norm", "before clipping", (("train/grad_norm", "norm"),)),
    (
        "Clipped tokens",
        "fraction whose ratio left the clip range",
        (("train/clip_fraction", "fraction"),),
    ),
    ("Entropy", "nats per trained token", (("train/entropy", "nats"),)),
    (
        "Time per batch",
        "seconds",
        (
            ("time/rollout_seconds", "rollout"),
            ("time/train_seconds", "train"),
            ("time/sync_seconds", "weights to engines"),
        ),
    ),
    ("Micro-batch fill", "tokens over token cap", (("schedule/fill", "fill"),)),
)
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 520, 240, 58, 26, 10, 14
_NUM_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    label: str
    """Name in the legend."""
    color: int
    """Number of its colour on the page."""
    points: tuple[tuple[float, float], ...]
    """Pixels."""
    values: tuple[tuple[float, float], ...]
    """(batch, value)."""
    dots: bool
    """Whether it is drawn as points alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    title: str
    """Heading."""
    subtitle: str
    """What is shown, and in which unit."""
    series: tuple[_Series, ...]
    """Those that have data."""
    x_ticks: tuple[tuple[float, str], ...]
    """(pixel, text) along the batches."""
    y_ticks: tuple[tuple[float, str], ...]
    """(pixel, text) along the values."""


def write_report(run_dir: Path) -> Path:
    """Write the report of a run from its `metrics.jsonl`, and return its path.

    Raises:
        OSError: the run's files cannot be read or the report cannot be written.
    """
    lines = read_metrics(run_dir)
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        resources.files("rl_runtime.tracking")
        .joinpath("report.html.jinja")
        .read_text(encoding="utf-8")
    )
    charts = [
        chart
        for title, subtitle, names in _CHARTS
        if (chart := _chart(title, subtitle, names, lines)) is not None
    ]
    page = template.render(
        run=run_dir.resolve().name,
        headline=_headline(lines),
        charts=charts,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        bottom=_HEIGHT - _BOTTOM,
        right=_WIDTH - _RIGHT,
        dumps=_files(run_dir, "dumps"),
        plans=_files(run_dir, "plans"),
        logs=_files(run_dir, "logs"),
        recipe=(run_dir / "recipe.toml").read_text(encoding="utf-8"),
        rows=_step_rows(lines),
    )
    path = run_dir / "report.html"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path


def _headline(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """List the cards at the top: what it is, its value, a remark."""
    cards = [
        (label, f"{values[0]:.2f} → {values[-1]:.2f}", f"{values[-1] - values[0]:+.2f}")
        for name, label in (
            ("eval/exact_match", "held-out exact match"),
            ("eval/reward_mean", "held-out reward"),
        )
        if (values := _values(name, lines))
    ]
    gaps = _values("train/log_prob_gap", lines)
    if gaps:
        cards.append(("first log-prob gap", f"{gaps[0]:.1e}", "nats"))
    steps = [line["batch"] for line in lines if "train/loss" in line]
    cards.append(("trained", f"{len(set(steps))} batches", f"{len(steps)} steps"))
    return cards


def _values(name: str, lines: Sequence[Mapping[str, Any]]) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def _chart(
    title: str, subtitle: str, names: Sequence[tuple[str, str]], lines: Sequence[Mapping[str, Any]]
) -> _Chart | None:
    data = {name: _over_batches(name, lines) for name, _ in names}
    points = [point for values in data.values() for point in values]
    if not points:
        return None
    x_low, x_high = _span([x for x, _ in points])
    y_steps = _ticks(*_span([y for _, y in points]))
    y_low, y_high = y_steps[0], y_steps[-1]

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _BOTTOM - _TOP)
        return round(across, 1), round(down, 1)

    series = tuple(
        _Series(
            label=label,
            color=index,
            points=tuple(to_pixels(x, y) for x, y in data[name]),
            values=tuple(data[name]),
            dots=name.startswith("eval/"),
        )
        for index, (name, label) in enumerate(names)
        if data[name]
    )
    x_ticks = tuple(
        (to_pixels(x, y_low)[0], f"{x:.0f}")
        for x in _ticks(x_low, x_high)
        if x_low <= x <= x_high and x == int(x)
    )
    y_ticks = tuple((to_pixels(x_low, y)[1], f"{y:.6g}") for y in y_steps)
    return _Chart(title=title, subtitle=subtitle, series=series, x_ticks=x_ticks, y_ticks=y_ticks)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """List round numbers, 1, 2 or 5 times a power of ten apart, that enclose `low` to `high`."""
    rough = (high - low) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _over_batches(name: str, lines: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """List one metric over batches; the steps of a batch are spread over its interval."""
    steps_of: Counter[int] = Counter(line["batch"] for line in lines if "train/loss" in line)
    seen: Counter[int] = Counter()
    points = []
    for line in lines:
        batch = line["batch"]
        if line.get(name) is not None:
            points.append((batch + seen[batch] / max(steps_of[batch], 1), float(line[name])))
        seen[batch] += "train/loss" in line
    return points


def _files(run_dir: Path, folder: str) -> list[tuple[str, str, int]]:
    """List (name, relative link, bytes) of a folder's files, by the numbers in their names."""
    paths = sorted(
        (run_dir / folder).glob("*"),
        key=lambda path: (path.stem.rstrip("0123456789"), len(path.stem), path.stem),
    )
    return [
        (path.name, os.path.relpath(path, run_dir), path.stat().st_size)
        for path in paths
        if path.is_file()
    ]


def _step_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = (
        "batch",
        "step",
        "rollout/reward_mean",
        "train/loss",
        "train/grad_norm",
        "train/clip_fraction",
        "train/entropy",
        "train/log_prob_gap",
        "time/batch_seconds",
    )
    rows = [[_cell(line.get(name)) for name in names] for line in lines if "train/loss" in line]
    return [list(names), *rows]


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4g}"
