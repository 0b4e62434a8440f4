"""How a set of metrics travels through two all-reduces.

The first is reduced with MAX, the second with SUM:

* extrema: a fixed-size head that starts with a digest of what the rank reports and passes and its
negative (their maxima cancel exactly when
  all ranks agree), then for each metric what must be known before sums make sense: the extreme
  itself, the newest stamp, the window of occupied buckets, and for moments a common origin;
* sums: numerators and weights; for moments count, `sum(x - s)` and `sum(x - s)^2` about the agreed
origin `s`, the greatest of the
  ranks' means. Chan's merge about one origin: as `s` lies among the means, nothing cancels that the
  spread of the means does not justify.

A histogram travels as the window between the outermost occupied buckets of all ranks, of at most
`MOST_BUCKETS` each side of zero. The window is known to all ranks after the first all-reduce, so
that all of them refuse a wider one.

Invariants, tested: the result equals merging all records in one process; extrema that are NaN stay
NaN although MAX may drop them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rl_metrics.contract import Kind
from rl_metrics.errors import MetricsError
from rl_metrics.metric import Metric
from rl_metrics.sketch import QuantileSketch

__all__ = ["HEAD_SIZE", "MOST_BUCKETS", "digest", "extrema", "sums", "unpack"]

FloatArray = npt.NDArray[np.float64]

HEAD_SIZE = 256
"""Numbers in the first all-reduce, which must have one size on all ranks even when they disagree: 2 KiB. Extrema beyond it need a second."""

MOST_BUCKETS = 2**20
"""Buckets of one sign that one histogram may span over all ranks: 8 MiB.

At a relative error of 0.01 all of float64 spans 71,000.
"""

_NONE = -math.inf


def digest(metrics: Sequence[Metric], settings: Mapping[str, str]) -> float:
    """Return 48 bits of a hash of what must be equal on all ranks: an integer that float64 holds
    exactly, never 0.

    Args:
        metrics: names, kinds and units enter, in this order.
        settings: what the rank wants to do with them, by name, such as the aggregation and the
            units of a train step.
    """
    bounds = [
        metric.sketch.relative_error if metric.sketch is not None else None for metric in metrics
    ]
    fields = [
        (metric.name, metric.kind, metric.unit, bound)
        for metric, bound in zip(metrics, bounds, strict=True)
    ]
    text = json.dumps([sorted(settings.items()), fields])
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") + 1)


def extrema(metrics: Sequence[Metric]) -> FloatArray:
    """Return the vector for the MAX all-reduce, without the head: float64, its length a function of the kinds alone."""
    parts: list[float] = []
    for metric in metrics:
        parts += _extrema_of(metric)
    return np.array(parts, np.float64)


def sums(metrics: Sequence[Metric], agreed: FloatArray) -> FloatArray:
    """Return the vector for the SUM all-reduce, given the agreed extrema: float64, of one length on
    all ranks.

    Raises:
        MetricsError: on all ranks the same, naming the histogram that spans more than
            `MOST_BUCKETS`.
    """
    tops = agreed.tolist()
    parts: list[float] = []
    start = 0
    for metric in metrics:
        stop = start + _NUM_EXTREMA[metric.kind]
        _check_window(metric, tops[start:stop])
        parts += _sums_of(metric, tops[start:stop])
        start = stop
    return np.array(parts, np.float64)


def unpack(metrics: Sequence[Metric], agreed: FloatArray, summed: FloatArray) -> list[Metric]:
    """Return the merged records, in the order of `metrics`, which gives names and kinds, from the two reduced vectors."""
    tops, totals = agreed.tolist(), summed.tolist()
    merged = []
    start = sum_start = 0
    for metric in metrics:
        top = tops[start : start + _NUM_EXTREMA[metric.kind]]
        sum_stop = (
            sum_start
            + _NUM_SUMS[metric.kind]
            + (_width(top[0], top[1]) + _width(top[2], top[3]) if metric.sketch is not None else 0)
        )
        merged.append(_merged(metric, top, totals[sum_start:sum_stop]))
        start, sum_start = start + len(top), sum_stop
    return merged


_NUM_EXTREMA: dict[Kind, int] = {
    "sum": 0,
    "mean": 0,
    "min": 1,
    "max": 1,
    "moments": 1,
    "last": 1,
    "histogram": 4,
}
"""Numbers of each kind in the first vector."""

_NUM_SUMS: dict[Kind, int] = {
    "sum": 2,
    "mean": 2,
    "min": 2,
    "max": 2,
    "moments": 3,
    "last": 2,
    "histogram": 4,
}
"""Numbers of each kind in the second vector; a histogram adds its agreed window."""


def _extrema_of(metric: Metric) -> list[float]:
    """Return what one metric needs the greatest of."""
    if metric.kind in ("sum", "mean"):
        return []
    if metric.sketch is not None:
        bounds = []
        for indices in (metric.sketch.positive_indices, metric.sketch.negative_indices):
            bounds += [float(indices[-1]), float(-indices[0])] if indices.size else [_NONE, _NONE]
        return bounds
    if not metric.weight:
        return [_NONE]
    if metric.kind == "last":
        return [metric.stamp]
    number = {"max": metric.numerator, "min": -metric.numerator}.get(metric.kind)
    if number is None:
        number = metric.moments.mean
        return [number if math.isfinite(number) else _NONE]
    return [_NONE if math.isnan(number) else number]


def _check_window(metric: Metric, top: list[float]) -> None:
    """Refuse a histogram whose agreed window is too wide to travel; every rank sees the same window and so raises the same."""
    if metric.sketch is None:
        return
    width = max(_width(top[0], top[1]), _width(top[2], top[3]))
    if width > MOST_BUCKETS:
        raise MetricsError(
            f"metric {metric.name!r}: its values span {width} buckets of relative error"
            f" {metric.sketch.relative_error}, at most {MOST_BUCKETS} can be reduced over ranks;"
            " give a greater relative_error, or mask values that are far from the others"
        )


def _sums_of(metric: Metric, top: list[float]) -> list[float]:
    """Return one metric's additive part, given its agreed extrema."""
    if metric.kind in ("sum", "mean"):
        return [metric.numerator, metric.weight]
    if metric.kind in ("min", "max"):
        return [metric.weight, float(math.isnan(metric.numerator))]
    if metric.kind == "last":
        return (
            [metric.numerator, metric.weight]
            if metric.weight and metric.stamp == top[0]
            else [0.0, 0.0]
        )
    if metric.sketch is not None:
        sketch = metric.sketch
        positive = _dense(sketch.positive_indices, sketch.positive_counts, top[0], top[1])
        negative = _dense(sketch.negative_indices, sketch.negative_counts, top[2], top[3])
        return [
            metric.numerator,
            metric.weight,
            sketch.zero,
            sketch.nonfinite,
            *positive,
            *negative,
        ]
    shift = metric.moments.mean - _origin(top) if metric.weight else 0.0
    return [metric.weight, metric.weight * shift, metric.m2 + metric.weight * shift * shift]


def _merged(metric: Metric, top: list[float], total: list[float]) -> Metric:
    """Return one merged record."""
    name, kind, unit = metric.name, metric.kind, metric.unit
    if kind in ("min", "max"):
        extreme = top[0] if kind == "max" else -top[0]
        return Metric(
            name=name,
            kind=kind,
            numerator=math.nan if total[1] else extreme,
            weight=total[0],
            unit=unit,
        )
    if kind == "last":
        return Metric(
            name=name,
            kind=kind,
            numerator=total[0],
            weight=total[1],
            unit=unit,
            stamp=top[0] if total[1] else 0.0,
        )
    if kind == "moments":
        if not total[0]:
            return Metric.empty(name, "moments", unit=unit)
        shift = total[1] / total[0]
        # Squares beyond float64 are infinite, as in one process; their difference would be NaN.
        m2 = (
            total[2]
            if math.isinf(total[2]) and math.isfinite(shift)
            else float(np.maximum(total[2] - total[1] * shift, 0.0))
        )
        return Metric(
            name=name,
            kind=kind,
            numerator=total[0] * (_origin(top) + shift),
            weight=total[0],
            unit=unit,
            m2=m2,
        )
    sketch = None
    if metric.sketch is not None:
        width = 4 + _width(top[0], top[1])
        positive_indices, positive_counts = _sparse(total[4:width], top[1])
        negative_indices, negative_counts = _sparse(total[width:], top[3])
        sketch = QuantileSketch(
            relative_error=metric.sketch.relative_error,
            zero=total[2],
            nonfinite=total[3],
            positive_indices=positive_indices,
            positive_counts=positive_counts,
            negative_indices=negative_indices,
            negative_counts=negative_counts,
        )
    return Metric(
        name=name, kind=kind, numerator=total[0], weight=total[1], unit=unit, sketch=sketch
    )


def _origin(top: list[float]) -> float:
    """Return the agreed origin of moments; 0 when no rank has a finite mean."""
    return top[0] if math.isfinite(top[0]) else 0.0


def _width(high: float, negative_low: float) -> int:
    """Return the number of buckets between the agreed bounds."""
    return int(high + negative_low) + 1 if math.isfinite(high) else 0


def _dense(
    indices: npt.NDArray[np.int64], counts: FloatArray, high: float, negative_low: float
) -> list[float]:
    """Lay a sparse histogram out over the agreed window."""
    window = np.zeros(_width(high, negative_low))
    if indices.size:
        window[indices + int(negative_low)] = counts
    dense: list[float] = window.tolist()
    return dense


def _sparse(window: list[float], negative_low: float) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Undo `_dense`."""
    counts = np.array(window, np.float64)
    occupied = np.flatnonzero(counts)
    return (occupied - int(negative_low) if occupied.size else occupied).astype(np.int64), counts[
        occupied
    ]
