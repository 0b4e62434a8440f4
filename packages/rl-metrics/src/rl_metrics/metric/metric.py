"""One metric as a mergeable record whose kind says how it merges.

`rl_metrics.metric.kinds` has the table of kinds; the collectives in `rl_metrics.torch` merge the
same records over ranks. A percentile is the lower neighbour: the value at rank `floor(q (n - 1))`
of the sorted values, counted from 0, to within the sketch's error.

Invariants, tested: `Metric.merge` is associative and commutative up to rounding; the kind is a
field and the name is never looked into (`minibatch_loss` declared a mean is a mean); weight 0 means
"no data", whose value is None and not 0.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import SupportsFloat

import numpy as np
import numpy.typing as npt

from rl_metrics.aggregation.masks import trained_values
from rl_metrics.arguments import count, finite_number, number, number_array
from rl_metrics.errors import MetricsError
from rl_metrics.metric.kinds import RULES, Kind, check_identity, numbers_problem
from rl_metrics.metric.moments import Moments
from rl_metrics.metric.sketch import DEFAULT_RELATIVE_ERROR, QuantileSketch

__all__ = ["Metric", "check_metric"]

_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A named, mergeable statistic.

    `Metric.of_mean("loss", 32.0, 100.0, unit="token").value` is 0.32. Build one with an `of_...`
    method, which fills the fields as the table in `rl_metrics.metric.kinds` says. Two records of
    equal fields are equal; NaN equals nothing.
    """

    name: str
    """Name in the log, any text that UTF-8 can hold. Carries no meaning."""

    kind: Kind
    """How records merge: sum, mean, min, max, moments, last or histogram."""

    numerator: float
    """See the table of kinds.

    Additive, or the extreme; NaN and infinity are values, and a sum beyond float64 (1.8e308) is
    infinite, also that of `moments` whose mean is not. Where the weight is 0: +inf for `min`, -inf
    for `max`, else 0.
    """

    weight: float
    """See the table of kinds; 0 means no data."""

    unit: str = ""
    """What one unit of weight is (`token`, `sample`, `rollout`, `prompt`) or what the value is
    measured in: free text, must agree to merge."""

    m2: float = 0.0
    """Kind `moments`: sum of squared deviations from the mean. 0 for others."""

    stamp: float = 0.0
    """Kind `last`: the step at which the value was taken; the greatest wins. 0 for others."""

    sketch: QuantileSketch | None = None
    """Kind `histogram`: the buckets. None for others."""

    def __post_init__(self) -> None:
        """Refuse fields of a wrong type or that contradict one another; keep numbers as floats."""
        check_identity(self.name, self.kind, self.unit)
        for field in ("numerator", "weight", "m2", "stamp"):
            object.__setattr__(
                self, field, number(getattr(self, field), f"metric {self.name!r}: {field}")
            )
        if (self.kind == "histogram") != isinstance(self.sketch, QuantileSketch):
            raise MetricsError(
                f"metric {self.name!r}: exactly the kind 'histogram' carries a sketch, this one is"
                f" {self.kind!r}"
            )
        problem = numbers_problem(
            self.kind,
            numerator=self.numerator,
            weight=self.weight,
            m2=self.m2,
            stamp=self.stamp,
            sketch_weight=None if self.sketch is None else self.sketch.count,
        )
        if problem:
            raise MetricsError(f"metric {self.name!r}: {problem}")

    @classmethod
    def empty(
        cls,
        name: str,
        kind: Kind,
        *,
        unit: str = "",
        relative_error: float = DEFAULT_RELATIVE_ERROR,
    ) -> Metric:
        """Return the record of a rank that has nothing to say: the neutral element of `merge`.

        Args:
            name: name in the log.
            kind: that of the ranks that have data.
            unit: that of the other ranks.
            relative_error: bound of the sketch, for `histogram`.

        Raises:
            MetricsError: for an empty name or an unknown kind.
        """
        check_identity(name, kind, unit)
        sketch = QuantileSketch(relative_error=relative_error) if kind == "histogram" else None
        empty = RULES[kind].empty
        return cls(name=name, kind=kind, numerator=empty, weight=0.0, unit=unit, sketch=sketch)

    @classmethod
    def _of_one(
        cls, name: str, kind: Kind, value: SupportsFloat, unit: str, stamp: float = 0.0
    ) -> Metric:
        """Return the record of a single value, which weighs 1."""
        numerator = number(value, f"metric {name!r}: the value")
        return cls(name=name, kind=kind, numerator=numerator, weight=1.0, unit=unit, stamp=stamp)

    @classmethod
    def of_sum(cls, name: str, value: SupportsFloat, *, unit: str = "") -> Metric:
        """Return one contribution to a sum.

        Args:
            name: name in the log.
            value: the contribution: a number or a 0-dim tensor.
            unit: what the value is measured in.

        Raises:
            MetricsError: naming the metric, when the value is no number.
        """
        return cls._of_one(name, "sum", value, unit)

    @classmethod
    def of_mean(
        cls, name: str, numerator: SupportsFloat, weight: SupportsFloat, *, unit: str = ""
    ) -> Metric:
        """Return one contribution to a weighted mean.

        Args:
            name: name in the log.
            numerator: the weighted SUM, not the local mean: a number or a 0-dim tensor.
            weight: how much of `unit` went into it; not negative. 0 says "no data", so the
                numerator must then be 0 too.
            unit: what one unit of weight is, such as `token`.

        Raises:
            MetricsError: naming the metric, for a weight that is negative, not finite, or 0 under a
                numerator that is not.

        Example:
            Losses 1 and 3 of two tokens: `Metric.of_mean("loss", 4.0, 2, unit="token").value` is 2.
        """
        return cls(
            name=name,
            kind="mean",
            numerator=number(numerator, f"metric {name!r}: the numerator"),
            weight=number(weight, f"metric {name!r}: the weight"),
            unit=unit,
        )

    @classmethod
    def of_min(cls, name: str, value: SupportsFloat, *, unit: str = "") -> Metric:
        """Return one contribution to a minimum; NaN wins over every number.

        Arguments and errors are those of `of_sum`.
        """
        return cls._of_one(name, "min", value, unit)

    @classmethod
    def of_max(cls, name: str, value: SupportsFloat, *, unit: str = "") -> Metric:
        """Return one contribution to a maximum, as `of_min` to a minimum."""
        return cls._of_one(name, "max", value, unit)

    @classmethod
    def of_last(
        cls, name: str, value: SupportsFloat, *, stamp: SupportsFloat, unit: str = ""
    ) -> Metric:
        """Return a value that replaces older ones, such as a learning rate.

        Over micro-batches and over ranks the greatest stamp wins, wherever it was reported; values
        of the same stamp are averaged, each contribution counting once.

        Args:
            name: name in the log.
            value: a number or a 0-dim tensor.
            stamp: the step it belongs to, any finite number.
            unit: what the value is measured in.

        Raises:
            MetricsError: naming the metric, when value or stamp are no numbers or the stamp is not
                finite.

        Example:
            2 at stamp 7, 4 at stamp 7 and 9 at stamp 6 give 3.
        """
        newest = finite_number(
            stamp, f"metric {name!r}: the stamp (the number of the step the value belongs to)"
        )
        return cls._of_one(name, "last", value, unit, newest)

    @classmethod
    def of_moments(
        cls, name: str, values: npt.ArrayLike, mask: npt.ArrayLike | None = None, *, unit: str = ""
    ) -> Metric:
        """Return mean and standard deviation of an array.

        Args:
            name: name in the log; the report adds `_mean` and `_std`.
            values: any shape.
            mask: same shape, of booleans or 0 and 1; entries where it is 0 do not enter. None takes
                all.
            unit: what the values are measured in.

        Raises:
            MetricsError: naming the metric, as in `rl_metrics.Moments.of`.
        """
        with _naming(name):
            moments = Moments.of(values, mask)
        return cls.from_moments(name, moments, unit=unit)

    @classmethod
    def from_moments(cls, name: str, moments: Moments, *, unit: str = "") -> Metric:
        """Return the record of given moments; `MetricsError` when they are something else."""
        if not isinstance(moments, Moments):
            raise MetricsError(
                f"metric {name!r}: moments is {type(moments).__name__}; give Moments, such as"
                " Moments.of(values)"
            )
        total = moments.mean * moments.count if moments.count else 0.0
        weight, m2 = moments.count, moments.m2
        return cls(name=name, kind="moments", numerator=total, weight=weight, unit=unit, m2=m2)

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
        """Return percentiles of an array.

        Args:
            name: name in the log; the report adds `_p50`, `_p90` and `_p99`.
            values: as in `of_moments`, like the mask and the unit.
            mask: as there.
            unit: as there.
            relative_error: a percentile is within this relative error of the value of that rank
                (the lower neighbour); at least 1e-12 and below 1.

        Raises:
            MetricsError: naming the metric, as in `rl_metrics.QuantileSketch.of`.
        """
        with _naming(name):
            array = trained_values(number_array(values, "the values"), mask)
            sketch = QuantileSketch.of(array, relative_error=relative_error)
        with np.errstate(invalid="ignore", over="ignore"):
            total = float(np.sum(array))
        weight = sketch.count
        return cls(
            name=name, kind="histogram", numerator=total, weight=weight, unit=unit, sketch=sketch
        )

    @property
    def value(self) -> float | None:
        """The value by kind (see the table); None when there is no data."""
        if not self.weight:
            return None
        if self.sketch is not None:
            return self.sketch.quantile(0.5)
        return self.numerator / self.weight if RULES[self.kind].is_divided else self.numerator

    @property
    def moments(self) -> Moments:
        """Count, mean and m2 of a record of kind `moments`; `MetricsError` for another kind."""
        if self.kind != "moments":
            raise MetricsError(
                f"metric {self.name!r} is of kind {self.kind!r}; only 'moments' has moments"
            )
        return Moments(
            count=self.weight, mean=self.numerator / self.weight if self.weight else 0.0, m2=self.m2
        )

    def replicated(self, copies: int) -> Metric:
        """Return the record as one of `copies` equal ones that together count once, to rounding.

        For values that several ranks hold in full: rewards and lengths are known to every CP rank
        of a sample, so each contributes `metric.replicated(cp_size)`. Disjoint parts need nothing.

        Args:
            copies: ranks that hold the value, an integer of at least 1.

        Raises:
            MetricsError: when `copies` is no integer of at least 1.
        """
        copies = count(
            copies, f"metric {self.name!r}: copies (the number of ranks that hold the value)"
        )
        return replace(
            self,
            numerator=self.numerator / (1 if RULES[self.kind].is_extreme else copies),
            weight=self.weight / copies,
            m2=self.m2 / copies,
            sketch=None if self.sketch is None else self.sketch.scaled(1.0 / copies),
        )

    def merge(self, other: Metric) -> Metric:
        """Return the record of both together.

        Args:
            other: a record of the same name, kind and unit.

        Raises:
            MetricsError: when `other` is no metric, when name, kind or unit differ, or two sketches
                have different error bounds.
        """
        check_metric(other, f"cannot merge metric {self.name!r} with it")
        for field in ("name", "kind", "unit"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                raise MetricsError(
                    f"cannot merge metric {self.name!r} with {other.name!r}: {field} is {mine!r}"
                    f" here and {theirs!r} there"
                )
        # Before a record without data steps aside: its bound must fit too, or the order of merging
        # would matter.
        sketch = (
            self.sketch.merge(other.sketch)
            if self.sketch is not None and other.sketch is not None
            else None
        )
        if not self.weight or not other.weight:
            return self if self.weight else other
        if self.kind == "moments":
            return Metric.from_moments(self.name, self.moments.merge(other.moments), unit=self.unit)
        if self.stamp != other.stamp:
            return self if self.stamp > other.stamp else other
        total = RULES[self.kind].combine(self.numerator, other.numerator)
        return replace(self, numerator=total, weight=self.weight + other.weight, sketch=sketch)

    def report(self) -> dict[str, float | None]:
        """Return what goes to a log: name -> value.

        `moments` gives `NAME_mean` and `NAME_std` (population), `histogram` gives `NAME_p50`,
        `NAME_p90`, `NAME_p99`, the others `NAME`. None stands for no data. A percentile is the
        lower neighbour: the value at rank `floor(q (n - 1))`.
        """
        if self.kind == "moments":
            return {
                f"{self.name}_mean": self.value,
                f"{self.name}_std": self.moments.standard_deviation(),
            }
        if self.sketch is not None:
            return {f"{self.name}_{suffix}": self.sketch.quantile(q) for suffix, q in _QUANTILES}
        return {self.name: self.value}

    def describe(self) -> str:
        """Return what must agree for records to merge, such as `"loss (mean, token)"`."""
        bound = f", error {self.sketch.relative_error!r}" if self.sketch is not None else ""
        return f"{self.name} ({self.kind}{', ' + self.unit if self.unit else ''}{bound})"


def check_metric(value: object, what: str) -> Metric:
    """Return a metric; a bare number is refused, since how it merges would have to be guessed.

    Args:
        value: anything.
        what: beginning of the error.

    Raises:
        MetricsError: when it is no `Metric`.
    """
    if not isinstance(value, Metric):
        raise MetricsError(
            f"{what}: got {type(value).__name__}, whose way to merge is not declared; give a"
            " Metric, such as Metric.of_mean"
        )
    return value


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the metric's name before every error of this package raised inside."""
    try:
        yield
    except MetricsError as error:
        raise MetricsError(f"metric {name!r}: {error}") from None
