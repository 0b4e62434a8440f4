"""How a set of metrics travels through two all-reduces.

Layer: numpy; :mod:`rl_metrics.torch` moves the two float64 vectors. The first is reduced with MAX, the second with SUM:

* extrema: a fixed-size head that starts with a digest of what the rank reports and its negative (their maxima cancel exactly when all ranks
  agree), then for each metric what must be known before sums make sense: the extreme itself, the newest stamp, the window of occupied
  buckets, and for moments a common origin;
* sums: numerators and weights; for moments count, ``sum(x - s)`` and ``sum(x - s)^2`` about the agreed origin ``s``, the greatest of the
  ranks' means. Chan's merge about one origin: as ``s`` lies among the means, nothing cancels that the spread of the means does not justify.

Invariants, tested: the result equals merging all records in one process; extrema that are NaN stay NaN although MAX may drop them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rl_metrics.metric import Metric
from rl_metrics.sketch import QuantileSketch

__all__ = ["HEAD_SIZE", "digest", "extrema", "sums", "unpack"]

FloatArray = npt.NDArray[np.float64]

HEAD_SIZE = 256
"""Numbers in the first all-reduce, which must have one size on all ranks even when they disagree: 2 KiB. Extrema beyond it need a second."""

_NONE = -math.inf


def digest(metrics: Sequence[Metric]) -> float:
    """Return 48 bits of a hash of all names, kinds and units: an integer that float64 holds exactly, never 0."""
    text = "\n".join(metric.describe() for metric in metrics)
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") + 1)


def extrema(metrics: Sequence[Metric]) -> FloatArray:
    """Return the vector for the MAX all-reduce, without the head."""
    parts: list[float] = []
    for metric in metrics:
        parts += _extrema_of(metric)
    return np.array(parts, np.float64)


def sums(metrics: Sequence[Metric], agreed: FloatArray) -> FloatArray:
    """Return the vector for the SUM all-reduce, given the agreed extrema."""
    parts: list[FloatArray] = []
    start = 0
    for metric in metrics:
        size = len(_extrema_of(metric))
        parts.append(_sums_of(metric, agreed[start : start + size]))
        start += size
    return np.concatenate(parts) if parts else np.empty(0)


def unpack(metrics: Sequence[Metric], agreed: FloatArray, summed: FloatArray) -> list[Metric]:
    """Return the merged records from the two reduced vectors; ``metrics`` gives names and kinds."""
    merged = []
    extreme_start = sum_start = 0
    for metric in metrics:
        size = len(_extrema_of(metric))
        top = agreed[extreme_start : extreme_start + size]
        width = _sums_of(metric, top).size
        merged.append(_merged(metric, top, summed[sum_start : sum_start + width]))
        extreme_start, sum_start = extreme_start + size, sum_start + width
    return merged


def _extrema_of(metric: Metric) -> list[float]:
    """Return what one metric needs the greatest of."""
    if metric.kind in ("min", "max"):
        known = metric.weight and not math.isnan(metric.numerator)
        return [(metric.numerator if metric.kind == "max" else -metric.numerator) if known else _NONE]
    if metric.kind == "last":
        return [metric.stamp if metric.weight else _NONE]
    if metric.kind == "moments":
        mean = metric.moments.mean
        return [mean if metric.weight and math.isfinite(mean) else _NONE]
    if metric.sketch is not None:
        bounds = []
        for indices in (metric.sketch.positive_indices, metric.sketch.negative_indices):
            bounds += [float(indices[-1]), float(-indices[0])] if indices.size else [_NONE, _NONE]
        return bounds
    return []


def _sums_of(metric: Metric, top: FloatArray) -> FloatArray:
    """Return one metric's additive part, given its agreed extrema."""
    if metric.kind in ("min", "max"):
        return np.array([metric.weight, float(math.isnan(metric.numerator))])
    if metric.kind == "last":
        newest = bool(metric.weight) and metric.stamp == top[0]
        return np.array([metric.numerator, metric.weight]) if newest else np.zeros(2)
    if metric.kind == "moments":
        if not metric.weight:
            return np.zeros(3)
        with np.errstate(invalid="ignore", over="ignore"):
            shift = np.float64(metric.moments.mean) - _origin(top)
            return np.array([metric.weight, metric.weight * shift, metric.m2 + metric.weight * shift * shift])
    if metric.sketch is not None:
        sketch = metric.sketch
        positive = _dense(sketch.positive_indices, sketch.positive_counts, top[0], top[1])
        negative = _dense(sketch.negative_indices, sketch.negative_counts, top[2], top[3])
        return np.concatenate([[metric.numerator, metric.weight, sketch.zero, sketch.nonfinite], positive, negative])
    return np.array([metric.numerator, metric.weight])


def _merged(metric: Metric, top: FloatArray, total: FloatArray) -> Metric:
    """Return one merged record."""
    if metric.kind in ("min", "max"):
        weight, nans = float(total[0]), float(total[1])
        extreme = float(top[0] if metric.kind == "max" else -top[0])
        return replace(metric, numerator=math.nan if nans else extreme, weight=weight)
    if metric.kind == "last":
        return replace(metric, numerator=float(total[0]), weight=float(total[1]), stamp=float(top[0]) if total[1] else 0.0)
    if metric.kind == "moments":
        weight = float(total[0])
        if not weight:
            return Metric.empty(metric.name, "moments", unit=metric.unit)
        shift = float(total[1]) / weight
        m2 = float(np.maximum(total[2] - total[1] * shift, 0.0))
        return replace(metric, numerator=weight * (_origin(top) + shift), weight=weight, m2=m2)
    if metric.sketch is not None:
        width = _width(top[0], top[1])
        positive_indices, positive_counts = _sparse(total[4 : 4 + width], top[1])
        negative_indices, negative_counts = _sparse(total[4 + width :], top[3])
        sketch = QuantileSketch(
            relative_error=metric.sketch.relative_error,
            zero=float(total[2]),
            nonfinite=float(total[3]),
            positive_indices=positive_indices,
            positive_counts=positive_counts,
            negative_indices=negative_indices,
            negative_counts=negative_counts,
        )
        return replace(metric, numerator=float(total[0]), weight=float(total[1]), sketch=sketch)
    return replace(metric, numerator=float(total[0]), weight=float(total[1]))


def _origin(top: FloatArray) -> float:
    """Return the agreed origin of moments; 0 when no rank has a finite mean."""
    return float(top[0]) if math.isfinite(top[0]) else 0.0


def _width(high: float, negative_low: float) -> int:
    """Return the number of buckets between the agreed bounds."""
    return int(high + negative_low) + 1 if math.isfinite(high) else 0


def _dense(indices: npt.NDArray[np.int64], counts: FloatArray, high: float, negative_low: float) -> FloatArray:
    """Lay a sparse histogram out over the agreed window."""
    window = np.zeros(_width(high, negative_low))
    if indices.size:
        window[indices + int(negative_low)] = counts
    return window


def _sparse(window: FloatArray, negative_low: float) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Undo :func:`_dense`."""
    occupied = np.flatnonzero(window)
    return (occupied - int(negative_low) if occupied.size else occupied).astype(np.int64), window[occupied]
