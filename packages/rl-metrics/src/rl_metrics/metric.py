"""One metric as a mergeable record whose kind says how it merges.

The collectives in `rl_metrics.torch` merge the same records over ranks.

=========  ==================================  =========================
=================================
kind       numerator                           weight                     value
=========  ==================================  =========================
=================================
sum        the sum                             contributions              numerator
mean       weighted sum                        sum of weights             numerator / weight
min, max   the extreme                         values seen                numerator
moments    sum                                 values seen                mean; the report adds the standard deviation
last       sum of the values of newest stamp   how many there are         numerator / weight
histogram  sum                                 values seen                median; the report adds p90 and p99
=========  ==================================  =========================
=================================

A percentile is the lower neighbour: the value at rank `floor(q (n - 1))` of the sorted values,
counted from 0, to within the sketch's error.

Invariants, tested: `Metric.merge` is associative and commutative up to rounding; the kind is a
field and the name is never looked into (`minibatch_loss` declared a mean is a mean); weight 0 means
"no data", whose value is None and not 0.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import SupportsFloat

import numpy as np
import numpy.typing as npt

from rl_metrics.arguments import count, finite_number, number, number_array
from rl_metrics.contract import KINDS, Kind, empty_numerator, numbers_problem, sketch_problem
from rl_metrics.errors import MetricsError
from rl_metrics.masks import trained_values
from rl_metrics.moments import Moments
from rl_metrics.sketch import DEFAULT_RELATIVE_ERROR, QuantileSketch

__all__ = ["Metric", "check_metric"]

_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A named, mergeable statistic.

    `Metric.of_mean("loss", 32.0, 100.0, unit="token").value` is 0.32.

    Build one with an `of_...` method, which fills the fields as the table in `rl_metrics.metric`
    says: `name`; `kind` (sum, mean, min, max, moments, last, histogram), which says how records
    merge; `numerator` and `weight` (0 means no data); `unit`, which must agree to merge; `m2`
    (moments: sum of squared deviations), `stamp` (last: when the value was taken) and `sketch`
    (histogram: the buckets). Two records of equal fields are equal; NaN equals nothing.
    """

    name: str
    """Name in the log, any text that UTF-8 can hold. Carries no meaning."""

    kind: Kind
    """How records merge."""

    numerator: float
    """See the table of kinds.

    Additive, or the extreme; NaN and infinity are values, and a sum beyond float64 (1.8e308) is
    infinite, also that of `moments` whose mean is not. Where the weight is 0: +inf for `min`, -inf
    for `max`, else 0.
    """

    weight: float
    """See the table of kinds; 0 means no data."""

    unit: str = ""
    """What one unit of weight is (`token`, `sample`, `rollout`, `prompt`) or what the value is measured in; free text, must agree to merge."""

    m2: float = 0.0
    """Kind `moments`: sum of squared deviations from the mean. 0 for others."""

    stamp: float = 0.0
    """Kind `last`: when the value was taken (a step number); the greatest wins, equal ones are averaged. 0 for others."""

    sketch: QuantileSketch | None = None
    """Kind `histogram`: the buckets. None for others."""

    def __post_init__(self) -> None:
        """Refuse an empty name, an unknown kind, fields that contradict one another, and whatever is no number; keep numbers as floats."""
        name: object = self.name
        if not isinstance(name, str) or not name:
            raise MetricsError(
                f"a metric needs a name, got {name!r}; give a string that is not empty"
            )
        kind: object = self.kind
        if not isinstance(kind, str) or kind not in KINDS:
            raise MetricsError(
                f"metric {self.name!r}: kind is {self.kind!r}; use one of {', '.join(KINDS)}"
            )
        if not isinstance(self.unit, str):
            raise MetricsError(
                f"metric {self.name!r}: unit is {self.unit!r}; give a string, '' for none"
            )
        _check_text(self.name, "name", self.name)
        _check_text(self.name, "unit", self.unit)
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
            self.kind, numerator=self.numerator, weight=self.weight, m2=self.m2, stamp=self.stamp
        )
        if self.sketch is not None and not problem:
            problem = sketch_problem(self.sketch.count, self.weight)
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
            kind: how records merge; that of the ranks that have data.
            unit: unit of the weight or of the value, that of the other ranks.
            relative_error: bound of the sketch, for `histogram`.

        Raises:
            MetricsError: for an empty name or an unknown kind.
        """
        given: object = kind
        sketch = (
            QuantileSketch(relative_error=relative_error)
            if isinstance(given, str) and given == "histogram"
            else None
        )
        return cls(
            name=name,
            kind=kind,
            numerator=empty_numerator(kind),
            weight=0.0,
            unit=unit,
            sketch=sketch,
        )

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
        return cls(
            name=name,
            kind="sum",
            numerator=number(value, f"metric {name!r}: the value"),
            weight=1.0,
            unit=unit,
        )

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

        Args:
            name: name in the log.
            value: the contribution: a number or a 0-dim tensor.
            unit: what the value is measured in.

        Raises:
            MetricsError: naming the metric, when the value is no number.
        """
        return cls(
            name=name,
            kind="min",
            numerator=number(value, f"metric {name!r}: the value"),
            weight=1.0,
            unit=unit,
        )

    @classmethod
    def of_max(cls, name: str, value: SupportsFloat, *, unit: str = "") -> Metric:
        """Return one contribution to a maximum; NaN wins over every number.

        Arguments and errors are those of `of_min`.
        """
        return cls(
            name=name,
            kind="max",
            numerator=number(value, f"metric {name!r}: the value"),
            weight=1.0,
            unit=unit,
        )

    @classmethod
    def of_last(
        cls, name: str, value: SupportsFloat, *, stamp: SupportsFloat, unit: str = ""
    ) -> Metric:
        """Return a value that replaces older ones, such as a learning rate.

        Over micro-batches and over ranks the greatest stamp wins, wherever it was reported; values
        of the same stamp are averaged, each contribution counting once.

        Args:
            name: name in the log.
            value: the value: a number or a 0-dim tensor.
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
        return cls(
            name=name,
            kind="last",
            numerator=number(value, f"metric {name!r}: the value"),
            weight=1.0,
            unit=unit,
            stamp=newest,
        )

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
        try:
            return cls.from_moments(name, Moments.of(values, mask), unit=unit)
        except MetricsError as error:
            raise _named(name, error) from None

    @classmethod
    def from_moments(cls, name: str, moments: Moments, *, unit: str = "") -> Metric:
        """Return the record of given moments.

        Args:
            name: name in the log.
            moments: count, mean and m2.
            unit: what the values are measured in.

        Raises:
            MetricsError: when `moments` is something else.
        """
        if not isinstance(moments, Moments):
            raise MetricsError(
                f"metric {name!r}: moments is {type(moments).__name__}; give Moments, such as"
                " Moments.of(values)"
            )
        total = moments.mean * moments.count if moments.count else 0.0
        return cls(
            name=name,
            kind="moments",
            numerator=total,
            weight=moments.count,
            unit=unit,
            m2=moments.m2,
        )

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
            values: any shape.
            mask: same shape, of booleans or 0 and 1; entries where it is 0 do not enter. None takes
                all.
            unit: what the values are measured in.
            relative_error: a percentile is within this relative error of the value of that rank
                (the lower neighbour); at least 1e-12 and below 1.

        Raises:
            MetricsError: naming the metric, as in `rl_metrics.QuantileSketch.of`.
        """
        try:
            array = trained_values(number_array(values, "the values"), mask)
            sketch = QuantileSketch.of(array, relative_error=relative_error)
        except MetricsError as error:
            raise _named(name, error) from None
        with np.errstate(invalid="ignore", over="ignore"):
            total = float(np.sum(array))
        return cls(
            name=name,
            kind="histogram",
            numerator=total,
            weight=sketch.count,
            unit=unit,
            sketch=sketch,
        )

    @property
    def value(self) -> float | None:
        """The value by kind (see the table); None when there is no data."""
        if not self.weight:
            return None
        if self.sketch is not None:
            return self.sketch.quantile(0.5)
        return (
            self.numerator / self.weight
            if self.kind in ("mean", "moments", "last")
            else self.numerator
        )

    @property
    def moments(self) -> Moments:
        """Count, mean and m2 of a record of kind `moments`.

        Raises:
            MetricsError: for another kind.
        """
        if self.kind != "moments":
            raise MetricsError(
                f"metric {self.name!r} is of kind {self.kind!r}; only 'moments' has moments"
            )
        return Moments(
            count=self.weight, mean=self.numerator / self.weight if self.weight else 0.0, m2=self.m2
        )

    def replicated(self, copies: int) -> Metric:
        """Return the record as one of `copies` equal ones, so that together they count once, to
        rounding.

        For values that several ranks of a group all hold in full: rewards and lengths are known to
        every CP rank of a sample, so each contributes `metric.replicated(cp_size)`. Values of which
        each rank holds a disjoint part need nothing.

        Args:
            copies: ranks that hold the value, an integer of at least 1.

        Raises:
            MetricsError: when `copies` is no integer of at least 1.
        """
        copies = count(
            copies, f"metric {self.name!r}: copies (the number of ranks that hold the value)"
        )
        numerator = self.numerator if self.kind in ("min", "max") else self.numerator / copies
        sketch = None if self.sketch is None else self.sketch.scaled(1.0 / copies)
        return replace(
            self,
            numerator=numerator,
            weight=self.weight / copies,
            m2=self.m2 / copies,
            sketch=sketch,
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
        weight = self.weight + other.weight
        if self.kind in ("min", "max"):
            return replace(
                self, numerator=_extreme(self.kind, self.numerator, other.numerator), weight=weight
            )
        if self.kind == "moments":
            return Metric.from_moments(self.name, self.moments.merge(other.moments), unit=self.unit)
        if self.kind == "last" and self.stamp != other.stamp:
            return self if self.stamp > other.stamp else other
        return replace(
            self, numerator=self.numerator + other.numerator, weight=weight, sketch=sketch
        )

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
        """Return name, kind and unit in one string, such as `"loss (mean, token)"`: what must agree for records to merge."""
        bound = f", error {self.sketch.relative_error!r}" if self.sketch is not None else ""
        return f"{self.name} ({self.kind}{', ' + self.unit if self.unit else ''}{bound})"


def _check_text(name: str, field: str, text: str) -> None:
    """Refuse text that cannot be written as UTF-8 (a lone surrogate): no log and no other rank could read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MetricsError(
            f"metric {name!r}: {field} is {text!a}, which UTF-8 cannot hold ({error.reason}); give"
            " text without lone surrogates"
        ) from None


def _extreme(kind: str, a: float, b: float) -> float:
    """Return the smaller or greater number; NaN if either is."""
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return min(a, b) if kind == "min" else max(a, b)


def check_metric(value: object, what: str) -> Metric:
    """Return a metric; a bare number is refused, since how it is to be merged would have to be
    guessed.

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


def _named(name: str, error: MetricsError) -> MetricsError:
    """Return the same error with the metric's name before it."""
    return MetricsError(f"metric {name!r}: {error}")
