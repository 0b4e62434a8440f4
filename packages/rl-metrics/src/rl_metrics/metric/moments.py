"""Count, mean and squared deviation that merge exactly: variance without cancellation.

The merge is the pairwise update of Chan, Golub and LeVeque ("Updating formulae and a pairwise
algorithm for computing sample variances", 1979). A one-pass `mean(x^2) - mean(x)^2` in float32 is
wrong by 80 % for N(30, 0.01^2); this is not.

Invariants, tested: merging is associative and commutative up to rounding; `Moments()` is its
neutral element; the result does not depend on how values are split, infinities included: with one
of them the mean is infinite, with both or with NaN it is NaN, and the m2 is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from rl_metrics.aggregation.masks import trained_values
from rl_metrics.arguments import count, finite_number, listed, number, number_array
from rl_metrics.errors import MetricsError

__all__ = ["Moments", "merge_moments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of numbers.

    `Moments.of([1, 2, 3, 6])` has count 4, mean 3, m2 14.
    """

    count: float = 0.0
    """How many numbers, or their total weight; finite and not negative."""

    mean: float = 0.0
    """Their mean; 0 when there are none."""

    m2: float = 0.0
    """Sum of squared deviations from the mean, not negative.

    NaN where a number is not finite, infinite where it exceeds float64.
    """

    def __post_init__(self) -> None:
        """Refuse a negative count or sum of squares, and whatever is no number."""
        object.__setattr__(
            self, "count", finite_number(self.count, "the count of moments", at_least=0.0)
        )
        object.__setattr__(self, "mean", number(self.mean, "the mean of moments"))
        object.__setattr__(self, "m2", number(self.m2, "the m2 of moments"))
        if self.m2 < 0:
            raise MetricsError(
                f"the m2 of moments is {self.m2:g}; a sum of squares is not negative"
            )

    @classmethod
    def of(cls, values: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Moments:
        """Take the moments of an array, two passes in float64.

        Args:
            values: any shape.
            mask: same shape, of booleans or 0 and 1; entries where it is 0 do not enter, whatever
                they hold. None takes all.

        Returns:
            The moments; `Moments()` when nothing is left.

        Raises:
            MetricsError: when the shapes differ, values are no numbers, or the mask holds something
                else than 0 and 1.
        """
        array = trained_values(number_array(values, "the values"), mask)
        if not array.size:
            return cls()
        with np.errstate(invalid="ignore", over="ignore"):
            mean = float(np.mean(array))
            if math.isinf(mean) and np.isfinite(array).all():
                # The sum exceeds float64, the mean does not.
                mean = float(np.sum(array / array.size))
            return cls(
                count=float(array.size), mean=mean, m2=float(np.sum(np.square(array - mean)))
            )

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets together.

        With `d = mean_b - mean_a` and `n = n_a + n_b`: mean = mean_a + d n_b / n, m2 = m2_a + m2_b
        + d^2 n_a n_b / n. Where a mean is not finite, mean = mean_a + mean_b and m2 is NaN, as in
        `of` of all values.

        Args:
            other: the moments of a disjoint set.

        Raises:
            MetricsError: when `other` is something else than moments.
        """
        if not isinstance(other, Moments):
            raise MetricsError(f"cannot merge moments with {type(other).__name__}; give Moments")
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        if not (math.isfinite(self.mean) and math.isfinite(other.mean)):
            return Moments(count=count, mean=self.mean + other.mean, m2=math.nan)
        delta = other.mean - self.mean
        # Two means of opposite sign may lie further apart than float64 reaches.
        mean = (
            self.mean + delta * (other.count / count)
            if math.isfinite(delta)
            else self.mean * (self.count / count) + other.mean * (other.count / count)
        )
        return Moments(
            count=count,
            mean=mean,
            m2=self.m2 + other.m2 + delta * delta * self.count * other.count / count,
        )

    def variance(self, *, ddof: int = 0) -> float | None:
        """Return `m2 / (count - ddof)`; None when the count does not exceed `ddof`.

        Args:
            ddof: 0 for the population's variance, 1 for the unbiased one of a sample.

        Raises:
            MetricsError: when `ddof` is no integer of at least 0.
        """
        ddof = count(ddof, "ddof", minimum=0)
        return self.m2 / (self.count - ddof) if self.count > ddof else None

    def standard_deviation(self, *, ddof: int = 0) -> float | None:
        """Return the root of `variance` with the same `ddof`, in the values' unit."""
        variance = self.variance(ddof=ddof)
        return None if variance is None else math.sqrt(variance)


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Merge any number of moments, left to right.

    Args:
        parts: may be empty, which gives `Moments()`.

    Raises:
        MetricsError: when a part is something else than `Moments`.

    Example:
        `merge_moments([Moments.of([1, 2]), Moments.of([3, 6])])` has count 4, mean 3 and m2 14.
    """
    return reduce(Moments.merge, listed(parts, "moments to merge"), Moments())
