"""Count, mean and squared deviation that merge exactly: variance without cancellation.

Layer: numpy, float64 throughout. The merge is the pairwise update of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for
computing sample variances", 1979). A one-pass ``mean(x^2) - mean(x)^2`` in float32 is wrong by 80 % for N(30, 0.01^2); this is not.

Invariants, tested: merging is associative and commutative up to rounding; ``Moments()`` is its neutral element; the result does not depend
on how values are split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from rl_metrics.errors import MetricsError

__all__ = ["Moments", "merge_moments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of numbers. ``Moments.of([1, 2, 3, 6])`` has count 4, mean 3, m2 14."""

    count: float = 0.0
    """How many numbers, or their total weight."""

    mean: float = 0.0
    """Their mean; 0 when there are none."""

    m2: float = 0.0
    """Sum of squared deviations from the mean."""

    @classmethod
    def of(cls, values: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Moments:
        """Take the moments of an array, two passes in float64.

        Args:
            values: any shape.
            mask: same shape; entries where it is zero do not enter, whatever they hold. None takes all.

        Returns:
            The moments; ``Moments()`` when nothing is left.

        Raises:
            MetricsError: when the shapes differ.
        """
        array = np.asarray(values, np.float64)
        if mask is not None:
            trained = np.asarray(mask) != 0
            if trained.shape != array.shape:
                raise MetricsError(f"values have shape {array.shape} but the mask {trained.shape}")
            array = array[trained]
        if not array.size:
            return cls()
        with np.errstate(invalid="ignore", over="ignore"):
            mean = float(np.mean(array))
            return cls(count=float(array.size), mean=mean, m2=float(np.sum(np.square(array - mean))))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets together.

        With ``d = mean_b - mean_a`` and ``n = n_a + n_b``: mean = mean_a + d n_b / n, m2 = m2_a + m2_b + d^2 n_a n_b / n.
        """
        if not self.count:
            return other
        if not other.count:
            return self
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return Moments(count=count, mean=mean, m2=self.m2 + other.m2 + delta * delta * self.count * other.count / count)

    def variance(self, *, ddof: int = 0) -> float | None:
        """Return ``m2 / (count - ddof)``; None when the count does not exceed ``ddof``."""
        return self.m2 / (self.count - ddof) if self.count > ddof else None

    def standard_deviation(self, *, ddof: int = 0) -> float | None:
        """Return the root of :meth:`variance`."""
        variance = self.variance(ddof=ddof)
        return None if variance is None else math.sqrt(variance)


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Merge any number of moments, left to right."""
    return reduce(Moments.merge, parts, Moments())
