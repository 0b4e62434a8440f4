"""What a sample costs: the protocol of cost models, the two simple ones, and exact int64 costs.

Decides how a cost model's answer becomes the integers that every balancer adds up.

Invariant: after `integer_costs` all sums over a step are exact, so a plan cannot depend on
summation order or platform.
"""

import math
from dataclasses import dataclass
from numbers import Real
from operator import ge
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import FloatArray, IntArray
from rl_schedule.errors import ScheduleError

__all__ = [
    "CostModel",
    "QuadraticCost",
    "TokenCost",
    "evaluate_cost",
    "integer_costs",
    "mean_cost",
]

_SUM_BITS = 61
"""No sum that a balancer forms reaches 2**61, so that int64 never overflows."""

_SHIFT = 64
"""Costs whose sum is beyond float64 are added up as multiples of 2**64."""


@runtime_checkable
class CostModel(Protocol):
    """Cost of samples by length.

    Any callable of this form will do; it must depend on the length alone.
    """

    def __call__(self, lengths: IntArray, /) -> npt.NDArray[Any]:
        """Return the cost of each sample.

        Args:
            lengths: int64 [n], padded tokens, each >= 1.

        Returns:
            Integers or floats [n], finite and >= 0, in any unit (only ratios matter).
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenCost:
    """One unit per token: `c(s) = s`. Right when attention is a small part of the work."""

    def __call__(self, lengths: IntArray, /) -> npt.NDArray[Any]:
        """Return `lengths` unchanged: int64 [n]."""
        return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class QuadraticCost:
    """`c(s) = linear * s + quadratic * s**2`; the default is what published schedulers use.

    It stands for the layers of a 7B transformer with full attention: 24576 = 6 * hidden
    4096, so the unit is FLOPs up to one common factor. Example:
    `QuadraticCost()(np.array([70_000]))` is 6_620_320_000, beyond int32.
    """

    linear: int = 24576
    """Cost per token, unit free."""
    quadratic: int = 1
    """Cost per pair of tokens, same unit."""

    def __post_init__(self) -> None:
        """Refuse a model under which work could be negative."""
        given: tuple[Any, ...] = (self.linear, self.quadratic)
        for value in given:
            if isinstance(value, bool) or not isinstance(value, Real) or not ge(value, 0):
                raise ScheduleError(
                    "QuadraticCost needs coefficients that are numbers >= 0, got"
                    f" {self.linear!r} and {self.quadratic!r}"
                )

    def __call__(self, lengths: IntArray, /) -> npt.NDArray[Any]:
        """Return the costs, int64 [n]; exact for lengths below two billion."""
        s = lengths.astype(np.int64, copy=False)
        return self.linear * s + self.quadratic * s * s


def evaluate_cost(model: CostModel, lengths: IntArray) -> npt.NDArray[Any]:
    """Call `model` and check what it returns: one finite number >= 0 per sample.

    The model gets a copy of `lengths`, so that one that works in place changes nothing of ours.

    Raises:
        ScheduleError: the model raises, or returns a wrong shape, something not numeric, or a value
            that is not finite or below 0 (named by its length).
    """
    try:
        costs = np.array(model(lengths.copy()))
    except Exception as error:
        raise ScheduleError(
            f"the cost model {model!r} raised {type(error).__name__} for {lengths.size} lengths:"
            f" {error}"
        ) from error
    if costs.shape != lengths.shape:
        raise ScheduleError(
            f"the cost model returned shape {costs.shape} for {lengths.size} lengths; return one"
            " cost per sample"
        )
    if costs.dtype.kind not in "iuf":
        raise ScheduleError(
            f"the cost model returned dtype {costs.dtype}; return integers or floats"
        )
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if bad.size:
        first = int(bad[0])
        raise ScheduleError(
            f"the cost of a sample of {int(lengths[first])} tokens is {costs[first]}; costs must be"
            " finite and >= 0 (int32 overflow?)"
        )
    return costs


def integer_costs(costs: npt.NDArray[Any], *, terms: int) -> IntArray:
    """Turn costs into int64 [n] such that `terms` times their sum stays below 2**61.

    Integers that fit are kept; everything else is multiplied by one power of two (exact in floating
    point) and rounded. With a million samples that moves a cost by less than 2**-41 of the total.

    Args:
        costs: [n] finite numbers >= 0.
        terms: how often the total may occur in one sum; bins and samples together bound it.
    """
    if costs.size == 0:
        return np.empty(0, dtype=np.int64)
    bits = _SUM_BITS - max(1, terms).bit_length()
    # The sum is exact, so the factor below is the same whatever the order of the samples.
    total, shift = _exact_sum(costs)
    if costs.dtype.kind in "iu" and not shift and total < 2.0**bits:
        return costs.astype(np.int64)
    if total == 0.0:
        return np.zeros(costs.size, dtype=np.int64)
    # total < 2**exponent of its unit, so the scaled total is below 2**(bits - 1): one bit is left
    # to round up.
    _, exponent = math.frexp(total)
    rounded: FloatArray = np.rint(np.ldexp(costs.astype(np.float64), bits - 1 - exponent - shift))
    return rounded.astype(np.int64)


def mean_cost(costs: npt.NDArray[Any], *, parts: int) -> float:
    """Return the sum of costs over `parts`, in their unit.

    Args:
        costs: [n] finite numbers >= 0.
        parts: what the sum is divided by, such as the ranks.

    Raises:
        ScheduleError: the mean is beyond float64, although every cost is within it.
    """
    total, shift = _exact_sum(costs)
    try:
        return math.ldexp(total / parts, shift)
    except OverflowError:
        raise ScheduleError(
            f"the costs of a step of {costs.size} samples add up to more than float64 holds"
            f" (largest {float(costs.max()):.3g}); give costs in a larger unit, only ratios matter"
        ) from None


def _exact_sum(costs: npt.NDArray[Any]) -> tuple[float, int]:
    """Return the sum of costs >= 0 as a float64 and the power of two it is a multiple of."""
    try:
        return math.fsum(costs.tolist()), 0
    except OverflowError:
        return math.fsum(np.ldexp(costs.astype(np.float64), -_SHIFT).tolist()), _SHIFT
