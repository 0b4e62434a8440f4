"""How a set of metrics travels through two all-reduces.

The first, of maxima, brings what must be known before sums make sense. Its head starts with a
digest of what the rank reports and its negative, whose maxima cancel exactly when all ranks agree.
Then each metric adds its extrema: the extreme itself, the newest stamp, the window of occupied
buckets, for moments a common origin. The second, of sums, brings numerators and weights; a
histogram travels as the window between the outermost buckets of all ranks.

Invariants, tested: the result equals merging all records in one process; extrema that are NaN stay
NaN although MAX may drop them; a window beyond `MOST_BUCKETS` is refused by all ranks alike.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from rl_metrics.arguments import FloatArray, IntArray
from rl_metrics.errors import MetricsError
from rl_metrics.metric.kinds import Kind
from rl_metrics.metric.metric import Metric

__all__ = ["HEAD_SIZE", "MOST_BUCKETS", "digest", "extrema", "places", "sums", "unpack"]

HEAD_SIZE = 256
"""Numbers in the first all-reduce, 2 KiB; extrema beyond it need a second.

One size on all ranks, even on ranks that disagree about the metrics.
"""

MOST_BUCKETS = 2**20
"""Buckets of one sign that one histogram may span over all ranks: 8 MiB.

At a relative error of 0.01 all of float64 spans 71,000.
"""

_NONE = -math.inf
"""The extremum of a record without data: every other rank's is greater."""


def digest(metrics: Sequence[Metric], settings: Mapping[str, str]) -> float:
    """Return 48 bits of a hash of what must be equal on all ranks, never 0.

    Args:
        metrics: names, kinds and units enter, in this order.
        settings: what the rank wants to do with them, by name, such as the aggregation and the
            units of a train step.

    Returns:
        An integer that float64 holds exactly.
    """
    fields = [
        (
            metric.name,
            metric.kind,
            metric.unit,
            None if metric.sketch is None else metric.sketch.relative_error,
        )
        for metric in metrics
    ]
    text = json.dumps([sorted(settings.items()), fields])
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") + 1)


def extrema(metrics: Sequence[Metric]) -> FloatArray:
    """Return the vector for the MAX all-reduce, without the head.

    Returns:
        float64, its length a function of the kinds alone.
    """
    return np.array([top for metric in metrics for top in _TRAVEL[metric.kind].extrema(metric)])


def sums(metrics: Sequence[Metric], agreed: FloatArray) -> FloatArray:
    """Return the vector for the SUM all-reduce, given the agreed extrema.

    Returns:
        float64, of one length on all ranks.

    Raises:
        MetricsError: on all ranks the same, naming the histogram that spans more than
            `MOST_BUCKETS`.
    """
    tops = zip(metrics, _tops(metrics, agreed), strict=True)
    return np.array([x for metric, top in tops for x in _TRAVEL[metric.kind].sums(metric, top)])


def unpack(metrics: Sequence[Metric], agreed: FloatArray, summed: FloatArray) -> list[Metric]:
    """Return the merged records from the two reduced vectors.

    Args:
        metrics: this rank's records, which give names, kinds and order.
        agreed: the reduced extrema.
        summed: the reduced sums.
    """
    totals, bounds = summed.tolist(), _bounds(metrics, agreed)
    return [
        _TRAVEL[metric.kind].merged(metric, top, totals[start:stop])
        for metric, top, (start, stop) in zip(metrics, _tops(metrics, agreed), bounds, strict=True)
    ]


def places(metrics: Sequence[Metric], agreed: FloatArray) -> dict[str, int]:
    """Return where the numbers of each metric start in the vector of `sums`, by name.

    A sum or a mean has its numerator there and its weight behind it.
    """
    bounds = _bounds(metrics, agreed)
    return {metric.name: start for metric, (start, _) in zip(metrics, bounds, strict=True)}


def _bounds(metrics: Sequence[Metric], agreed: FloatArray) -> list[tuple[int, int]]:
    """Return where the numbers of each metric start and stop in the vector of `sums`."""
    bounds, start = [], 0
    for metric, top in zip(metrics, _tops(metrics, agreed), strict=True):
        window = 0 if metric.sketch is None else sum(_widths(top))
        stop = start + _TRAVEL[metric.kind].num_sums + window
        bounds.append((start, stop))
        start = stop
    return bounds


def _tops(metrics: Sequence[Metric], agreed: FloatArray) -> list[list[float]]:
    """Cut the agreed extrema into those of each metric."""
    tops = iter(agreed.tolist())
    return [list(islice(tops, _TRAVEL[metric.kind].num_extrema)) for metric in metrics]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Travel:
    """What records of one kind put into the two vectors, and how they are read back."""

    num_extrema: int = 0
    """Numbers in the first vector."""

    extrema: Callable[[Metric], list[float]] = lambda _: []
    """Gives what the greatest is needed of."""

    num_sums: int = 2
    """Numbers in the second vector, without a histogram's window."""

    sums: Callable[[Metric, list[float]], list[float]]
    """Gives the additive part, for given agreed extrema."""

    merged: Callable[[Metric, list[float], list[float]], Metric]
    """Gives the merged record from agreed extrema and sums."""


def _extreme(sign: float) -> _Travel:
    """Return how a maximum travels (sign 1) or a minimum, as the maximum of negatives (sign -1)."""

    def extrema(metric: Metric) -> list[float]:
        return [_NONE if math.isnan(metric.numerator) else sign * metric.numerator]

    def sums(metric: Metric, _: list[float]) -> list[float]:
        return [metric.weight, float(math.isnan(metric.numerator))]

    def merged(metric: Metric, top: list[float], total: list[float]) -> Metric:
        numerator = math.nan if total[1] else sign * top[0]
        return replace(metric, numerator=numerator, weight=total[0])

    return _Travel(num_extrema=1, extrema=extrema, sums=sums, merged=merged)


def _newest(metric: Metric, top: list[float]) -> list[float]:
    is_newest = metric.weight and metric.stamp == top[0]
    return [metric.numerator, metric.weight] if is_newest else [0.0, 0.0]


def _merged_newest(metric: Metric, top: list[float], total: list[float]) -> Metric:
    stamp = top[0] if total[1] else 0.0
    return replace(metric, numerator=total[0], weight=total[1], stamp=stamp)


def _mean(metric: Metric) -> list[float]:
    mean = metric.moments.mean
    return [mean if metric.weight and math.isfinite(mean) else _NONE]


def _moments_about_origin(metric: Metric, top: list[float]) -> list[float]:
    """Return count, `sum(x - s)` and `sum(x - s)^2` about the agreed origin `s`.

    `s` is the greatest of the ranks' means, so nothing cancels that the spread of the means does
    not justify.
    """
    shift = metric.moments.mean - _origin(top) if metric.weight else 0.0
    return [metric.weight, metric.weight * shift, metric.m2 + metric.weight * shift * shift]


def _merged_moments(metric: Metric, top: list[float], total: list[float]) -> Metric:
    count, first, second = total
    if not count:
        return Metric.empty(metric.name, "moments", unit=metric.unit)
    shift = first / count
    # Squares beyond float64 are infinite, as in one process; their difference would be NaN.
    m2 = (
        second
        if math.isinf(second) and math.isfinite(shift)
        else float(np.maximum(second - first * shift, 0.0))
    )
    return replace(metric, numerator=count * (_origin(top) + shift), weight=count, m2=m2)


def _origin(top: list[float]) -> float:
    """Return the agreed origin of moments; 0 when no rank has a finite mean."""
    return top[0] if math.isfinite(top[0]) else 0.0


def _signed(metric: Metric) -> list[tuple[str, IntArray, FloatArray]]:
    """Return sign, buckets and counts of either side of zero of a histogram."""
    return [
        (sign, getattr(metric.sketch, f"{sign}_indices"), getattr(metric.sketch, f"{sign}_counts"))
        for sign in ("positive", "negative")
    ]


def _window(metric: Metric) -> list[float]:
    """Return the greatest bucket and the negative of the smallest, of either sign, and of values.

    Six numbers: two of positive buckets, two of negative ones, then the greatest value and the
    negative of the least.
    """
    assert metric.sketch is not None
    pairs = [
        (float(indices[-1]), float(-indices[0])) if indices.size else (_NONE, _NONE)
        for _, indices, _ in _signed(metric)
    ]
    low, high = metric.sketch.bounds
    return [*(bound for pair in pairs for bound in pair), high, -low]


def _widths(top: list[float]) -> list[int]:
    """Return how many buckets lie between the agreed bounds, on either side of zero."""
    pairs = zip(top[:4:2], top[1:4:2], strict=True)
    return [int(high + low) + 1 if math.isfinite(high) else 0 for high, low in pairs]


def _buckets_in_window(metric: Metric, top: list[float]) -> list[float]:
    """Return the sums of a histogram: its sketch laid out over the agreed window."""
    assert metric.sketch is not None
    widths = _widths(top)
    if max(widths) > MOST_BUCKETS:
        raise MetricsError(
            f"metric {metric.name!r}: its values span {max(widths)} buckets of relative error"
            f" {metric.sketch.relative_error}, at most {MOST_BUCKETS} can be reduced over ranks;"
            " give a greater relative_error, or mask values that are far from the others"
        )
    parts = [metric.numerator, metric.weight, metric.sketch.zero, metric.sketch.nonfinite]
    for (_, indices, counts), width, negative_low in zip(
        _signed(metric), widths, top[1:4:2], strict=True
    ):
        window = np.zeros(width)
        if indices.size:
            window[indices + int(negative_low)] = counts
        parts += window.tolist()
    return parts


def _merged_buckets(metric: Metric, top: list[float], total: list[float]) -> Metric:
    """Undo `_buckets_in_window`."""
    assert metric.sketch is not None
    numerator, weight, zero, nonfinite, *window = total
    widths = _widths(top)
    buckets: dict[str, Any] = {}
    for (sign, _, _), counts, negative_low in zip(
        _signed(metric), np.split(np.array(window, np.float64), widths[:1]), top[1:4:2], strict=True
    ):
        occupied = np.flatnonzero(counts)
        # The bound of an empty window is infinite, which is no integer.
        low = -int(negative_low) if occupied.size else 0
        buckets |= {f"{sign}_indices": occupied + low, f"{sign}_counts": counts[occupied]}
    *_, high, negative_low = top
    buckets |= {"minimum": -negative_low, "maximum": high}
    sketch = replace(metric.sketch, zero=zero, nonfinite=nonfinite, **buckets)
    return replace(metric, numerator=numerator, weight=weight, sketch=sketch)


_ADDITIVE = _Travel(
    sums=lambda metric, _: [metric.numerator, metric.weight],
    merged=lambda metric, _, total: replace(metric, numerator=total[0], weight=total[1]),
)

_TRAVEL: dict[Kind, _Travel] = {
    "sum": _ADDITIVE,
    "mean": _ADDITIVE,
    "min": _extreme(-1.0),
    "max": _extreme(1.0),
    "moments": _Travel(
        num_extrema=1, extrema=_mean, num_sums=3, sums=_moments_about_origin, merged=_merged_moments
    ),
    "last": _Travel(
        num_extrema=1,
        extrema=lambda metric: [metric.stamp if metric.weight else _NONE],
        sums=_newest,
        merged=_merged_newest,
    ),
    "histogram": _Travel(
        num_extrema=6, extrema=_window, num_sums=4, sums=_buckets_in_window, merged=_merged_buckets
    ),
}
