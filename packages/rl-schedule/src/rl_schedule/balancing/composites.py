"""Tight packings: long samples first fitted to one another, then dealt, then topped up with short
ones; algorithm layer.

Decides where long samples go when a greedy pass cannot fit them, because a micro-batch holds only
two or three of them and the fit has to be tight. Invariants: the cap holds; exactly `num_bins` bins
result; bounded by counts.
"""

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.greedy import costs_when_full, top_up
from rl_schedule.balancing.levelling import level_bins
from rl_schedule.balancing.problem import StepProblem
from rl_schedule.balancing.two_level import LptState, two_level_lpt
from rl_schedule.bounds import common_level
from rl_schedule.dealing import bin_sums
from rl_schedule.karmarkar_karp import deal_by_differencing
from rl_schedule.packing import fill_best_fit

__all__ = ["pack_composites"]

_CAP_SEARCH_STEPS = 6
"""Halvings of the interval in which the smallest sufficient cap is sought: within 1.6 % of the interval."""

_FEW_MISSING = 0.02
"""Share of bins left empty by a packing at which no smaller cap is sought: sharing with the last opened does as well."""

_SPREAD_OVER = (32, 16, 8, 4, 2)
"""Last opened bins that share with each empty one: as many as a capped pass can level."""


def pack_composites(problem: StepProblem, *, num_long: int) -> IntArray | None:
    """Fit the `num_long` longest samples together, level and deal their bins, then place the rest
    by two-level LPT.

    Args:
        problem: the step.
        num_long: 1 to n; n fits all samples to one another.

    Returns:
        The rank-major bin of each sample, int64 [n], or None when they do not fit.
    """
    lengths, costs = problem.lengths[:num_long], problem.costs[:num_long]
    fitted = _fit_evenly(problem, num_long)
    if fitted is None:
        return None
    fitted = _spread_over_empty_bins(problem, fitted)
    mean = int(problem.costs.sum()) // problem.num_bins
    fitted = level_bins(
        fitted, lengths, costs, cap=problem.cap, num_bins=problem.num_bins, level=mean
    )
    sums, full = bin_sums(costs, fitted, problem.num_bins), costs_when_full(problem, fitted)
    expected = np.minimum(full, common_level(full[:, None], sums, int(problem.costs.sum())))
    order = deal_by_differencing(expected, problem.num_ranks)
    place = np.empty(problem.num_bins, dtype=np.int64)
    place[order.ravel()] = np.arange(problem.num_bins)
    return top_up(problem, place[fitted])


def _fit_evenly(problem: StepProblem, num_long: int) -> IntArray | None:
    """Best-fit-decreasing under the smallest cap found that needs no more bins than there are; None
    if the cap is not enough.

    A smaller cap spreads the samples over as many bins as there are (the idea of MULTIFIT: Coffman,
    Garey and Johnson, 1978).
    """
    lengths = problem.lengths[:num_long].tolist()
    whole = num_long == problem.lengths.size
    best = (
        problem.packings.best_fit
        if whole
        else np.asarray(fill_best_fit(lengths, problem.cap), dtype=np.int64)
    )
    used = int(best.max()) + 1
    if used > problem.num_bins:
        return None
    low, high = sum(min(length, problem.cap) for length in lengths) // problem.num_bins, problem.cap
    for _ in range(_CAP_SEARCH_STEPS):
        if problem.num_bins - used <= _FEW_MISSING * problem.num_bins or high - low <= 1:
            break
        guess = max(low + 1, high * used // problem.num_bins)
        tried = fill_best_fit(lengths, guess)
        count = max(tried) + 1
        if count <= problem.num_bins:
            best, used, high = np.asarray(tried, dtype=np.int64), count, guess
        else:
            low = max(guess, (low + high) // 2)
    return best


def _spread_over_empty_bins(problem: StepProblem, bin_of: IntArray) -> IntArray:
    """Share what the last opened bins hold with the bins that stayed empty, by capped LPT.

    Best-fit-decreasing opens its last bins for the shortest samples, several to a bin, so there is
    something to share. The more bins take part, the less each of them falls below the others.
    """
    used = int(bin_of.max()) + 1
    missing = problem.num_bins - used
    for share in _SPREAD_OVER if missing else ():
        first = max(used - share * missing, 0)
        moving = np.flatnonzero(bin_of >= first)
        bins = problem.num_bins - first
        state = LptState.empty(num_ranks=1, num_slots=bins, cap=problem.cap, targets=[0] * bins)
        placed = two_level_lpt(
            problem.lengths[moving].tolist(), problem.costs[moving].tolist(), state, problem.cap
        )
        if placed is not None:
            shared = bin_of.copy()
            shared[moving] = np.asarray(placed, dtype=np.int64) + first
            return shared
    return bin_of
