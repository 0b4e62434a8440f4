"""A quantile sketch of bounded relative error that merges exactly.

The sketch is the one of Masson, Rim and Lee ("DDSketch", VLDB 2019): with `g = (1 + a) / (1 - a)` a
magnitude `v` falls into bucket `i = ceil(log_g v)`, which holds `(g^(i-1), g^i]` and answers with
`2 g^i / (g + 1)`, at most `a v` away from every `v` in it.

Invariants, tested: for finite data a quantile is within relative error `a` of the true order
statistic (values below the smallest normal float64 count as zero) and never outside the data, whose
least and greatest value are kept; counts add, so merging is associative, commutative and loses
nothing; size is bounded by the range of magnitudes, 1,400 buckets for twelve decades at `a = 0.01`,
not by the number of values.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_metrics.aggregation.masks import trained_values
from rl_metrics.arguments import (
    FloatArray,
    IntArray,
    as_array,
    finite_number,
    number,
    number_array,
)
from rl_metrics.errors import MetricsError

__all__ = ["DEFAULT_RELATIVE_ERROR", "SMALLEST_RELATIVE_ERROR", "QuantileSketch"]

DEFAULT_RELATIVE_ERROR = 0.01
"""Default error bound: a reported percentile is within 1 % of the true one."""

SMALLEST_RELATIVE_ERROR = 1e-12
"""Bounds below it are finer than float64 can tell buckets apart."""

_TINY = float(np.finfo(np.float64).tiny)
"""Magnitudes below it have too few bits for the error bound and count as zero."""

_COUNT_SLACK = 1e-9
"""Relative slack of ranks: shares of one value (1/3 + 1/3 + 1/3) may miss 1 by rounding."""

_LARGEST_SLACK = 0.25
"""Most slack, so that it never reaches the next value."""

_SIGNS = ("positive", "negative")


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

    positive_indices: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 [p]: buckets of positive values, ascending."""

    positive_counts: FloatArray = field(default_factory=lambda: np.empty(0, np.float64))
    """float64 [p]: weight in each."""

    negative_indices: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 [q]: buckets of the magnitudes of negative values, ascending."""

    negative_counts: FloatArray = field(default_factory=lambda: np.empty(0, np.float64))
    """float64 [q]: weight in each."""

    minimum: float | None = None
    """The least finite value, exact; +inf where there is none.

    None is replaced by the least value that the buckets answer with.
    """

    maximum: float | None = None
    """The greatest finite value, exact; -inf where there is none.

    None is replaced by the greatest value that the buckets answer with.
    """

    def __post_init__(self) -> None:
        """Refuse a bound outside its range, negative weights, and buckets that do not ascend."""
        bound = number(self.relative_error, "relative_error")
        if not SMALLEST_RELATIVE_ERROR <= bound < 1:
            raise MetricsError(
                f"relative_error is {self.relative_error}; it must lie between"
                f" {SMALLEST_RELATIVE_ERROR} and 1, for example 0.01"
            )
        object.__setattr__(self, "relative_error", bound)
        for name in ("zero", "nonfinite"):
            what = f"the weight {name!r} of a sketch"
            weight = finite_number(getattr(self, name), what, at_least=0.0)
            object.__setattr__(self, name, weight)
        # No float64 falls into a bucket beyond: 35,488 for a bound of 0.01.
        limit = math.ceil(math.log(sys.float_info.max) / self._log_base())
        for sign in _SIGNS:
            indices, counts = _checked_buckets(
                getattr(self, f"{sign}_indices"), getattr(self, f"{sign}_counts"), sign, limit
            )
            object.__setattr__(self, f"{sign}_indices", indices)
            object.__setattr__(self, f"{sign}_counts", counts)
        self._set_bounds()

    def _set_bounds(self) -> None:
        """Keep least and greatest value as floats; refuse those that no data has."""
        values, weights = self._answers()
        answered = values[weights > 0]
        known = (
            (float(answered[0]), float(answered[-1])) if answered.size else (math.inf, -math.inf)
        )
        low, high = (
            default if given is None else number(given, f"the {name} of a sketch")
            for name, given, default in zip(
                ("minimum", "maximum"), (self.minimum, self.maximum), known, strict=True
            )
        )
        fits = (
            math.isfinite(low) and math.isfinite(high) and low <= high
            if answered.size
            else (low, high) == known
        )
        if not fits:
            wanted = (
                "finite numbers, the least not above the greatest"
                if answered.size
                else "inf and -inf, since the sketch holds no finite value"
            )
            raise MetricsError(
                f"minimum and maximum of a sketch are {low:g} and {high:g}; give {wanted}"
            )
        object.__setattr__(self, "minimum", low)
        object.__setattr__(self, "maximum", high)

    def __eq__(self, other: object) -> bool:
        """Say whether two sketches hold the same weights under the same bound."""
        if not isinstance(other, QuantileSketch):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        """Equal sketches have equal hashes."""
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        """Return everything that makes sketches equal."""
        return tuple(
            tuple(np.atleast_1d(getattr(self, each.name)).tolist()) for each in fields(self)
        )

    @classmethod
    def of(
        cls,
        values: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        *,
        weights: npt.ArrayLike | None = None,
        relative_error: float = DEFAULT_RELATIVE_ERROR,
    ) -> QuantileSketch:
        """Sketch an array.

        Args:
            values: any shape.
            mask: same shape, of booleans or 0 and 1; entries where it is 0 do not enter. None takes
                all.
            weights: same shape, how often each value counts, above 0; None counts each once.
            relative_error: bound on the relative error of a quantile, at least 1e-12 and below 1.

        Raises:
            MetricsError: when the shapes differ, values are no numbers, the mask holds something
                else than 0 and 1, a weight is not positive, or the bound lies outside its range.
        """
        array = trained_values(number_array(values, "the values"), mask)
        counts = np.ones(array.size)
        if weights is not None:
            given = number_array(weights, "the weights")
            counts = trained_values(given, np.ones(given.shape) if mask is None else mask)
            if counts.shape != array.shape or not ((counts > 0) & (counts < np.inf)).all():
                raise MetricsError(
                    f"{array.size} values have weights of shape {given.shape}; give a positive"
                    " number for each"
                )
        is_finite = np.isfinite(array)
        finite, finite_counts = array[is_finite], counts[is_finite]
        empty = cls(relative_error=relative_error)
        buckets: dict[str, Any] = {}
        for sign, signed in zip(_SIGNS, (finite, -finite), strict=True):
            chosen = signed >= _TINY
            logarithms = np.log(signed[chosen]) / empty._log_base()
            indices, inverse = np.unique(np.ceil(logarithms).astype(np.int64), return_inverse=True)
            held = np.bincount(inverse, finite_counts[chosen], minlength=indices.size)
            buckets |= {f"{sign}_indices": indices, f"{sign}_counts": held}
        return cls(
            relative_error=empty.relative_error,
            zero=float(finite_counts[np.abs(finite) < _TINY].sum()),
            nonfinite=float(counts[~is_finite].sum()),
            minimum=float(np.min(finite, initial=math.inf)),
            maximum=float(np.max(finite, initial=-math.inf)),
            **buckets,
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

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest finite value; `(inf, -inf)` where there is none."""
        assert self.minimum is not None
        assert self.maximum is not None
        return self.minimum, self.maximum

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
        buckets: dict[str, Any] = {}
        for sign in _SIGNS:
            indices, counts = (
                np.concatenate([getattr(part, f"{sign}_{name}") for part in (self, other)])
                for name in ("indices", "counts")
            )
            places, inverse = np.unique(indices, return_inverse=True)
            sums = np.bincount(inverse, weights=counts, minlength=places.size)
            buckets |= {f"{sign}_indices": places, f"{sign}_counts": sums}
        (low, high), (low_there, high_there) = self.bounds, other.bounds
        return replace(
            self,
            zero=self.zero + other.zero,
            nonfinite=self.nonfinite + other.nonfinite,
            minimum=min(low, low_there),
            maximum=max(high, high_there),
            **buckets,
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
        return replace(
            self,
            zero=self.zero * factor,
            nonfinite=self.nonfinite * factor,
            positive_counts=self.positive_counts * factor,
            negative_counts=self.negative_counts * factor,
        )

    def quantile(self, q: float) -> float | None:
        """Return the value at rank `floor(q (n - 1))` of the sorted data, within the error bound.

        Ranks count from 0. Between two values the lower one is the answer, without interpolation:
        the median of 1 and 3 is 1. That is `numpy.quantile(..., method="lower")`, to within the
        sketch's error. The answer lies within the data; rank 0 and the last rank are exact.

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
        low, high = self.bounds
        if q in (0, 1):
            return high if q else low
        values, weights = self._answers()
        # Rank k lies in the first bucket by which more than k of the weight is reached.
        reached = np.cumsum(weights)
        target = q * (total - 1) + min(_COUNT_SLACK * total, _LARGEST_SLACK)
        place = int(np.searchsorted(reached, target, side="right"))
        # Rounding may point past the data or, at rank 0, before it.
        occupied = np.flatnonzero(weights)
        return min(max(float(values[min(max(place, occupied[0]), occupied[-1])]), low), high)

    def _answers(self) -> tuple[FloatArray, FloatArray]:
        """Return what each bucket answers with, ascending, and the weight it holds."""
        values = np.concatenate(
            [
                -self._estimates(self.negative_indices)[::-1],
                [0.0],
                self._estimates(self.positive_indices),
            ]
        )
        weights = np.concatenate([self.negative_counts[::-1], [self.zero], self.positive_counts])
        return values, weights

    def _log_base(self) -> float:
        """Return `log g`; log1p keeps the digits of a small bound."""
        return math.log1p(self.relative_error) - math.log1p(-self.relative_error)

    def _estimates(self, indices: IntArray) -> FloatArray:
        """Return `2 g^i / (g + 1) = (1 - a) g^i` for each bucket, at most the greatest float."""
        # The top bucket reaches past float64.
        with np.errstate(over="ignore"):
            estimates: FloatArray = np.minimum(
                np.exp(indices * self._log_base() + math.log1p(-self.relative_error)),
                np.finfo(np.float64).max,
            )
        return estimates


def _checked_buckets(
    indices: npt.ArrayLike, counts: npt.ArrayLike, sign: str, limit: int
) -> tuple[IntArray, FloatArray]:
    """Return buckets of one sign as arrays; their indices lie in `-limit..limit`."""
    places = as_array(indices, f"the {sign} buckets of a sketch")
    weights = number_array(counts, f"the {sign} counts of a sketch")
    if places.ndim != 1 or places.shape != weights.shape:
        raise MetricsError(
            f"a sketch has {places.size} {sign} buckets but {weights.size} counts; give flat arrays"
            " of one length"
        )
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
