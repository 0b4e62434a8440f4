"""A quantile sketch of bounded relative error that merges exactly.

The sketch is the one of Masson, Rim and Lee ("DDSketch", VLDB 2019): with `g = (1 + a) / (1 - a)` a
magnitude `v` falls into bucket `i = ceil(log_g v)`, which holds `(g^(i-1), g^i]` and answers with
`2 g^i / (g + 1)`, at most `a v` away from every `v` in it.

Invariants, tested: for finite data a quantile is within relative error `a` of the true order
statistic (values below the smallest normal float64 count as zero); counts add, so merging is
associative, commutative and loses nothing; size is bounded by the range of magnitudes, 1,400
buckets for twelve decades at `a = 0.01`, not by the number of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rl_metrics.arguments import as_array, finite_number, number, number_array
from rl_metrics.context_parallel import IntArray
from rl_metrics.contract import SMALLEST_RELATIVE_ERROR, largest_bucket
from rl_metrics.errors import MetricsError
from rl_metrics.masks import trained_values

__all__ = ["DEFAULT_RELATIVE_ERROR", "QuantileSketch"]

DEFAULT_RELATIVE_ERROR = 0.01
"""Default error bound: a reported percentile is within 1 % of a value that is the true percentile."""

_TINY = float(np.finfo(np.float64).tiny)
_COUNT_SLACK = 1e-9
"""Shares of one value held by several ranks (1/3 + 1/3 + 1/3) may miss 1 by rounding; ranks are compared with this relative slack,"""
_LARGEST_SLACK = 0.25
"""but never with so much that it reaches the next value."""

FloatArray = npt.NDArray[np.float64]


def _no_indices() -> IntArray:
    return np.empty(0, np.int64)


def _no_counts() -> FloatArray:
    return np.empty(0, np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantileSketch:
    """Weights in geometric buckets.

    `QuantileSketch.of([1.0, 2.0, 3.0]).quantile(0.5)` lies within 1 % of 2.

    Sketches are equal when their bound and all weights are.
    """

    relative_error: float = DEFAULT_RELATIVE_ERROR
    """`a`: bound on the relative error of a quantile, at least 1e-12 and below 1."""

    zero: float = 0.0
    """Weight of zeros."""

    nonfinite: float = 0.0
    """Weight of NaN and infinities.

    Where it is positive every quantile is NaN, since their order is unknown.
    """

    positive_indices: IntArray = field(default_factory=_no_indices)
    """int64 [p]: buckets of positive values, ascending."""

    positive_counts: FloatArray = field(default_factory=_no_counts)
    """float64 [p]: weight in each."""

    negative_indices: IntArray = field(default_factory=_no_indices)
    """int64 [q]: buckets of the magnitudes of negative values, ascending."""

    negative_counts: FloatArray = field(default_factory=_no_counts)
    """float64 [q]: weight in each."""

    def __post_init__(self) -> None:
        """Refuse an error bound outside its range, weights that are none, and buckets that are no ascending indices with a count each."""
        bound = number(self.relative_error, "relative_error")
        if not SMALLEST_RELATIVE_ERROR <= bound < 1:
            raise MetricsError(
                f"relative_error is {self.relative_error}; it must lie between"
                f" {SMALLEST_RELATIVE_ERROR} and 1, for example 0.01"
            )
        object.__setattr__(self, "relative_error", bound)
        for name in ("zero", "nonfinite"):
            object.__setattr__(
                self,
                name,
                finite_number(
                    getattr(self, name), f"the weight {name!r} of a sketch", at_least=0.0
                ),
            )
        for sign in ("positive", "negative"):
            indices, counts = _checked_buckets(
                getattr(self, f"{sign}_indices"), getattr(self, f"{sign}_counts"), sign, bound
            )
            object.__setattr__(self, f"{sign}_indices", indices)
            object.__setattr__(self, f"{sign}_counts", counts)

    def __eq__(self, other: object) -> bool:
        """Say whether two sketches hold the same weights under the same bound."""
        return (
            self._fields() == other._fields()
            if isinstance(other, QuantileSketch)
            else NotImplemented
        )

    def __hash__(self) -> int:
        """Equal sketches have equal hashes."""
        return hash(self._fields())

    def _fields(self) -> tuple[object, ...]:
        """Return everything that makes sketches equal."""
        buckets = (
            self.positive_indices,
            self.positive_counts,
            self.negative_indices,
            self.negative_counts,
        )
        return (
            self.relative_error,
            self.zero,
            self.nonfinite,
            *(tuple(array.tolist()) for array in buckets),
        )

    @classmethod
    def of(
        cls,
        values: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        *,
        relative_error: float = DEFAULT_RELATIVE_ERROR,
    ) -> QuantileSketch:
        """Sketch an array.

        Args:
            values: any shape.
            mask: same shape, of booleans or 0 and 1; entries where it is 0 do not enter. None takes
                all.
            relative_error: bound on the relative error of a quantile, at least 1e-12 and below 1.

        Raises:
            MetricsError: when the shapes differ, values are no numbers, the mask holds something
                else than 0 and 1, or the bound lies outside its range.
        """
        array = trained_values(number_array(values, "the values"), mask)
        finite = array[np.isfinite(array)]
        empty = cls(relative_error=relative_error)
        positive_indices, positive_counts = empty._buckets(finite[finite >= _TINY])
        negative_indices, negative_counts = empty._buckets(-finite[finite <= -_TINY])
        return cls(
            relative_error=relative_error,
            zero=float(np.count_nonzero(np.abs(finite) < _TINY)),
            nonfinite=float(array.size - finite.size),
            positive_indices=positive_indices,
            positive_counts=positive_counts,
            negative_indices=negative_indices,
            negative_counts=negative_counts,
        )

    @property
    def count(self) -> float:
        """Total weight, values that are not finite included."""
        return (
            self.zero
            + self.nonfinite
            + float(self.positive_counts.sum())
            + float(self.negative_counts.sum())
        )

    def merge(self, other: QuantileSketch) -> QuantileSketch:
        """Return the sketch of both sets together: the counts add.

        Args:
            other: a sketch of the same `relative_error`.

        Raises:
            MetricsError: when the error bounds differ, since then the buckets do, or `other` is no
                sketch.
        """
        if not isinstance(other, QuantileSketch):
            raise MetricsError(
                f"cannot merge a sketch with {type(other).__name__}; give a QuantileSketch"
            )
        if self.relative_error != other.relative_error:
            raise MetricsError(
                f"cannot merge sketches of relative error {self.relative_error} and"
                f" {other.relative_error}: use one bound"
            )
        positive_indices, positive_counts = _add(
            self.positive_indices,
            self.positive_counts,
            other.positive_indices,
            other.positive_counts,
        )
        negative_indices, negative_counts = _add(
            self.negative_indices,
            self.negative_counts,
            other.negative_indices,
            other.negative_counts,
        )
        return QuantileSketch(
            relative_error=self.relative_error,
            zero=self.zero + other.zero,
            nonfinite=self.nonfinite + other.nonfinite,
            positive_indices=positive_indices,
            positive_counts=positive_counts,
            negative_indices=negative_indices,
            negative_counts=negative_counts,
        )

    def scaled(self, factor: float) -> QuantileSketch:
        """Return the sketch with every weight multiplied by `factor`.

        `k` sketches scaled by `1 / k` merge to the original. One alone stands for a part of every
        value, so its quantiles mean little.

        Args:
            factor: a finite number above 0.

        Raises:
            MetricsError: unless `factor` is a finite number above 0.
        """
        factor = finite_number(factor, "the factor of a sketch", above=0.0)
        return QuantileSketch(
            relative_error=self.relative_error,
            zero=self.zero * factor,
            nonfinite=self.nonfinite * factor,
            positive_indices=self.positive_indices,
            positive_counts=self.positive_counts * factor,
            negative_indices=self.negative_indices,
            negative_counts=self.negative_counts * factor,
        )

    def quantile(self, q: float) -> float | None:
        """Return the value at rank `floor(q (n - 1))` of the sorted data, counted from 0, within
        the error bound.

        Between two values the lower one is the answer, without interpolation: the median of 1 and 3
        is 1. That is `numpy.quantile(..., method="lower")`, to within the sketch's error.

        Args:
            q: between 0 and 1.

        Returns:
            The estimate; NaN when the data held a value that is not finite; None when there is no
            data.

        Raises:
            MetricsError: for `q` outside [0, 1].
        """
        q = number(q, "the quantile")
        if not 0 <= q <= 1:
            raise MetricsError(f"quantile {q} does not exist; give a number between 0 and 1")
        total = self.count
        if not total:
            return None
        if self.nonfinite:
            return math.nan
        values = np.concatenate(
            [
                -self._estimates(self.negative_indices)[::-1],
                [0.0],
                self._estimates(self.positive_indices),
            ]
        )
        weights = np.concatenate([self.negative_counts[::-1], [self.zero], self.positive_counts])
        reached = np.cumsum(weights)
        target = q * (total - 1) + min(_COUNT_SLACK * total, _LARGEST_SLACK)
        place = int(np.searchsorted(reached, target, side="right"))
        occupied = np.flatnonzero(weights)
        return float(values[min(max(place, occupied[0]), occupied[-1])])

    def _log_base(self) -> float:
        return math.log1p(self.relative_error) - math.log1p(-self.relative_error)

    def _buckets(self, magnitudes: FloatArray) -> tuple[IntArray, FloatArray]:
        """Return the occupied buckets of positive numbers and their counts."""
        indices, counts = np.unique(
            np.ceil(np.log(magnitudes) / self._log_base()).astype(np.int64), return_counts=True
        )
        return indices, counts.astype(np.float64)

    def _estimates(self, indices: IntArray) -> FloatArray:
        """Return `2 g^i / (g + 1) = (1 - a) g^i` for each bucket; the top bucket reaches past the greatest float and is cut there."""
        with np.errstate(over="ignore"):
            estimates: FloatArray = np.minimum(
                np.exp(indices * self._log_base() + math.log1p(-self.relative_error)),
                np.finfo(np.float64).max,
            )
        return estimates


def _checked_buckets(
    indices: npt.ArrayLike, counts: npt.ArrayLike, sign: str, relative_error: float
) -> tuple[IntArray, FloatArray]:
    """Return buckets of one sign as arrays, after checking that they are some a float64 can fall into."""
    places, weights = (
        as_array(indices, f"the {sign} buckets of a sketch"),
        number_array(counts, f"the {sign} counts of a sketch"),
    )
    if places.ndim != 1 or places.shape != weights.shape:
        raise MetricsError(
            f"a sketch has {places.size} {sign} buckets but {weights.size} counts; give flat arrays"
            " of one length"
        )
    limit = largest_bucket(relative_error)
    whole = not places.size or places.dtype.kind in "iu"
    if (
        not whole
        or (places[1:] <= places[:-1]).any()
        or (places.size and not -limit <= places[0] <= places[-1] <= limit)
    ):
        raise MetricsError(
            f"the {sign} buckets of a sketch are {_start(places)}; give ascending integers in"
            f" -{limit}..{limit}"
        )
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise MetricsError(
            f"the {sign} counts of a sketch are {_start(weights)}; give finite numbers that are not"
            " negative"
        )
    return places.astype(np.int64, copy=False), weights


def _start(array: npt.NDArray[np.generic]) -> str:
    """Return the first entries of an array, for an error."""
    return f"{array[:5].tolist()}{'' if array.size <= 5 else ' and more'}"


def _add(
    indices_a: IntArray, counts_a: FloatArray, indices_b: IntArray, counts_b: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Add two sparse histograms."""
    indices, inverse = np.unique(np.concatenate([indices_a, indices_b]), return_inverse=True)
    return indices, np.bincount(
        inverse, weights=np.concatenate([counts_a, counts_b]), minlength=indices.size
    ).astype(np.float64)
