"""One metric as a mergeable record whose kind says how it merges.

Layer: numpy; above ``moments`` and ``sketch``. The collectives in :mod:`rl_metrics.torch` merge the same records over ranks.

=========  ==================================  =========================  =================================
kind       numerator                           weight                     value
=========  ==================================  =========================  =================================
sum        the sum                             contributions              numerator
mean       weighted sum                        sum of weights             numerator / weight
min, max   the extreme                         values seen                numerator
moments    sum                                 values seen                mean; the report adds the standard deviation
last       sum of the values of newest stamp   how many there are         numerator / weight
histogram  sum                                 values seen                median; the report adds p90 and p99
=========  ==================================  =========================  =================================

Invariants, tested: :meth:`Metric.merge` is associative and commutative up to rounding; the kind is a field and the name is never looked
into (``minibatch_loss`` declared a mean is a mean); weight 0 means "no data", whose value is None and not 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rl_metrics.contract import KINDS, Kind
from rl_metrics.errors import MetricsError
from rl_metrics.moments import Moments
from rl_metrics.sketch import DEFAULT_RELATIVE_ERROR, QuantileSketch

__all__ = ["Metric", "merge_metrics", "report"]

_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A named, mergeable statistic. ``Metric.of_mean("loss", 32.0, 100.0, unit="token").value`` is 0.32.

    Build one with an ``of_...`` method, which fills the fields as the table in :mod:`rl_metrics.metric` says.
    """

    name: str
    """Name in the log. Carries no meaning."""

    kind: Kind
    """How records merge."""

    numerator: float
    """See the table of kinds. Additive, or the extreme. Where the weight is 0: +inf for ``min``, -inf for ``max``, else 0."""

    weight: float
    """See the table of kinds; 0 means no data."""

    unit: str = ""
    """What one unit of weight is (``token``, ``sample``, ``rollout``, ``prompt``) or what the value is measured in; free text, must agree to merge."""

    m2: float = 0.0
    """Kind ``moments``: sum of squared deviations from the mean. 0 for others."""

    stamp: float = 0.0
    """Kind ``last``: when the value was taken (a step number); the greatest wins, equal ones are averaged. 0 for others."""

    sketch: QuantileSketch | None = None
    """Kind ``histogram``: the buckets. None for others."""

    def __post_init__(self) -> None:
        """Refuse an empty name, an unknown kind, a negative weight, or a histogram without buckets."""
        if not self.name:
            raise MetricsError("a metric needs a name")
        if self.kind not in KINDS:
            raise MetricsError(f"metric {self.name!r}: kind is {self.kind!r}; use one of {', '.join(KINDS)}")
        if not 0 <= self.weight < math.inf:
            raise MetricsError(f"metric {self.name!r}: weight is {self.weight}; give a finite number that is not negative, 0 for no data")
        if (self.kind == "histogram") != (self.sketch is not None):
            raise MetricsError(f"metric {self.name!r}: exactly the kind 'histogram' carries a sketch, this one is {self.kind!r}")

    @classmethod
    def empty(cls, name: str, kind: Kind, *, unit: str = "", relative_error: float = DEFAULT_RELATIVE_ERROR) -> Metric:
        """Return the record of a rank that has nothing to say: the neutral element of :meth:`merge`."""
        numerator = {"min": math.inf, "max": -math.inf}.get(kind, 0.0)
        sketch = QuantileSketch(relative_error=relative_error) if kind == "histogram" else None
        return cls(name=name, kind=kind, numerator=numerator, weight=0.0, unit=unit, sketch=sketch)

    @classmethod
    def of_sum(cls, name: str, value: float, *, unit: str = "") -> Metric:
        """Return one contribution to a sum."""
        return cls(name=name, kind="sum", numerator=float(value), weight=1.0, unit=unit)

    @classmethod
    def of_mean(cls, name: str, numerator: float, weight: float, *, unit: str = "") -> Metric:
        """Return one contribution to a weighted mean: ``numerator`` is the weighted SUM, not the local mean."""
        return cls(name=name, kind="mean", numerator=float(numerator), weight=float(weight), unit=unit)

    @classmethod
    def of_min(cls, name: str, value: float, *, unit: str = "") -> Metric:
        """Return one contribution to a minimum."""
        return cls(name=name, kind="min", numerator=float(value), weight=1.0, unit=unit)

    @classmethod
    def of_max(cls, name: str, value: float, *, unit: str = "") -> Metric:
        """Return one contribution to a maximum."""
        return cls(name=name, kind="max", numerator=float(value), weight=1.0, unit=unit)

    @classmethod
    def of_last(cls, name: str, value: float, *, stamp: float, unit: str = "") -> Metric:
        """Return a value that replaces older ones, such as a learning rate; ``stamp`` is the step it belongs to."""
        if not math.isfinite(stamp):
            raise MetricsError(f"metric {name!r}: stamp is {stamp}; give the finite number of the step the value belongs to")
        return cls(name=name, kind="last", numerator=float(value), weight=1.0, unit=unit, stamp=float(stamp))

    @classmethod
    def of_moments(cls, name: str, values: npt.ArrayLike, mask: npt.ArrayLike | None = None, *, unit: str = "") -> Metric:
        """Return mean and standard deviation of an array, of the entries whose mask is not zero."""
        return cls.from_moments(name, Moments.of(values, mask), unit=unit)

    @classmethod
    def from_moments(cls, name: str, moments: Moments, *, unit: str = "") -> Metric:
        """Return the record of given moments."""
        return cls(name=name, kind="moments", numerator=moments.mean * moments.count, weight=moments.count, unit=unit, m2=moments.m2)

    @classmethod
    def of_histogram(
        cls,
        name: str,
        values: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        *,
        unit: str = "",
        relative_error: float = DEFAULT_RELATIVE_ERROR,
    ) -> Metric:
        """Return percentiles of an array to within ``relative_error``, of the entries whose mask is not zero."""
        sketch = QuantileSketch.of(values, mask, relative_error=relative_error)
        array = np.asarray(values, np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            total = float(np.sum(array if mask is None else array[np.asarray(mask) != 0]))
        return cls(name=name, kind="histogram", numerator=total, weight=sketch.count, unit=unit, sketch=sketch)

    @property
    def value(self) -> float | None:
        """The value by kind (see the table); None when there is no data."""
        if not self.weight:
            return None
        if self.sketch is not None:
            return self.sketch.quantile(0.5)
        return self.numerator / self.weight if self.kind in ("mean", "moments", "last") else self.numerator

    @property
    def moments(self) -> Moments:
        """Count, mean and m2 of a record of kind ``moments``.

        Raises:
            MetricsError: for another kind.
        """
        if self.kind != "moments":
            raise MetricsError(f"metric {self.name!r} is of kind {self.kind!r}; only 'moments' has moments")
        return Moments(count=self.weight, mean=self.numerator / self.weight if self.weight else 0.0, m2=self.m2)

    def replicated(self, copies: int) -> Metric:
        """Return the record as one of ``copies`` equal ones, so that together they count once.

        For values that several ranks of a group all hold in full: rewards and lengths are known to every CP rank of a sample, so each
        contributes ``metric.replicated(cp_size)``. Values of which each rank holds a disjoint part need nothing.

        Raises:
            MetricsError: when ``copies`` is below 1.
        """
        if copies < 1:
            raise MetricsError(f"metric {self.name!r}: copies is {copies}; it counts the ranks that hold the value, so give at least 1")
        share = 1.0 / copies
        numerator = self.numerator if self.kind in ("min", "max") else self.numerator * share
        sketch = None if self.sketch is None else self.sketch.scaled(share)
        return replace(self, numerator=numerator, weight=self.weight * share, m2=self.m2 * share, sketch=sketch)

    def merge(self, other: Metric) -> Metric:
        """Return the record of both together.

        Raises:
            MetricsError: when name, kind or unit differ, or two sketches have different error bounds.
        """
        for field in ("name", "kind", "unit"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                raise MetricsError(f"cannot merge metric {self.name!r} with {other.name!r}: {field} is {mine!r} here and {theirs!r} there")
        if not self.weight or not other.weight:
            return self if self.weight else other
        weight = self.weight + other.weight
        if self.kind in ("min", "max"):
            return replace(self, numerator=_extreme(self.kind, self.numerator, other.numerator), weight=weight)
        if self.kind == "moments":
            return Metric.from_moments(self.name, self.moments.merge(other.moments), unit=self.unit)
        if self.kind == "last" and self.stamp != other.stamp:
            return self if self.stamp > other.stamp else other
        sketch = self.sketch.merge(other.sketch) if self.sketch is not None and other.sketch is not None else None
        return replace(self, numerator=self.numerator + other.numerator, weight=weight, sketch=sketch)

    def report(self) -> dict[str, float | None]:
        """Return what goes to a log: name -> value.

        ``moments`` gives ``NAME_mean`` and ``NAME_std`` (population), ``histogram`` gives ``NAME_p50``, ``NAME_p90``, ``NAME_p99``, the
        others ``NAME``. None stands for no data.
        """
        if self.kind == "moments":
            return {f"{self.name}_mean": self.value, f"{self.name}_std": self.moments.standard_deviation()}
        if self.sketch is not None:
            return {f"{self.name}_{suffix}": self.sketch.quantile(q) for suffix, q in _QUANTILES}
        return {self.name: self.value}

    def describe(self) -> str:
        """Return name, kind and unit in one string: what must agree for records to merge."""
        bound = f", error {self.sketch.relative_error:g}" if self.sketch is not None else ""
        return f"{self.name} ({self.kind}{', ' + self.unit if self.unit else ''}{bound})"


def merge_metrics(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Merge records by name, in one process.

    Returns:
        name -> merged record, in order of first appearance.

    Raises:
        MetricsError: as in :meth:`Metric.merge`.
    """
    merged: dict[str, Metric] = {}
    for metric in metrics:
        known = merged.get(metric.name)
        merged[metric.name] = metric if known is None else known.merge(metric)
    return merged


def report(metrics: Iterable[Metric]) -> dict[str, float | None]:
    """Return what goes to a log for many metrics: see :meth:`Metric.report`.

    Raises:
        MetricsError: when two metrics report under one name.
    """
    lines: dict[str, float | None] = {}
    for metric in metrics:
        for name, value in metric.report().items():
            if name in lines:
                raise MetricsError(f"two metrics report under the name {name!r}; rename one of them")
            lines[name] = value
    return lines


def _extreme(kind: str, a: float, b: float) -> float:
    """Return the smaller or greater number; NaN if either is."""
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return min(a, b) if kind == "min" else max(a, b)
