"""Tight packings: long samples fitted to one another, then dealt, then topped up with short ones.

Needed where a greedy pass gets stuck because a micro-batch holds only two or three long samples and
their fit has to be tight.

Invariants: the cap holds; exactly `num_bins` bins result; bounded by counts.

Axis letters: N samples (longest first), L of them long, D ranks, M slots, K = D * M bins.
"""

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.bounds import common_level
from rl_schedule.balancing.greedy import fill_levels, run_lpt, top_up
from rl_schedule.balancing.problem import StepProblem
from rl_schedule.balancing.rank_assignment import renumber_bins
from rl_schedule.balancing.swap_between_bins import level_bins
from rl_schedule.balancing.two_level import LptState
from rl_schedule.packing import deal_by_differencing, fill_best_fit

__all__ = ["pack_long_first"]

_CAP_SEARCH_STEPS = 6
"""Halvings of the interval in which the least sufficient cap is sought: within 1.6 % of it."""

_FEW_MISSING = 0.02
"""Share of empty bins up to which no smaller cap is sought: sharing with the last ones does."""

_SPREAD_OVER = (32, 16, 8, 4, 2)
"""Last opened bins that share with each empty one: as many as a capped pass can level."""


def pack_long_first(problem: StepProblem, *, num_long: int) -> IntArray | None:
    """Fit the longest samples together, level and deal their bins, then place the rest by cost.

    Args:
        problem: the step.
        num_long: 1 to N; N fits all samples to one another.

    Returns:
        The rank-major bin of each sample, int64 [N], or None when they do not fit.
    """
    fitted_L = _fit_evenly(problem, num_long)
    if fitted_L is None:
        return None
    total, num_bins = int(problem.costs.sum()), problem.num_bins
    fitted_L = level_bins(
        _spread_over_empty_bins(problem, fitted_L),
        problem.lengths[:num_long],
        problem.costs[:num_long],
        cap=problem.cap,
        num_bins=num_bins,
        level=total // num_bins,
    )
    # Ranks are levelled on what bins will cost once the short samples are in, not on what they cost
    # now: as much as their room allows, but no more than the common level that the rest can reach.
    cost_K, _, full_K = fill_levels(problem, fitted_L)
    expected_K = np.minimum(full_K, common_level(full_K[:, None], cost_K, total))
    bins_DM = deal_by_differencing(expected_K, problem.num_ranks)
    return top_up(problem, renumber_bins(fitted_L, bins_DM))


def _fit_evenly(problem: StepProblem, num_long: int) -> IntArray | None:
    """Fit samples into as many bins as there are, all about equally full; None if they need more.

    Best-fit-decreasing under the smallest cap found that still needs no more bins: a smaller cap
    spreads the samples (the idea of MULTIFIT: Coffman, Garey and Johnson, 1978).
    """
    lengths = problem.lengths[:num_long].tolist()
    if num_long == problem.lengths.size:
        best = problem.packings.best_fit
    else:
        best = np.asarray(fill_best_fit(lengths, problem.cap), dtype=np.int64)
    used = int(best.max()) + 1
    if used > problem.num_bins:
        return None
    low, high = sum(min(length, problem.cap) for length in lengths) // problem.num_bins, problem.cap
    for _ in range(_CAP_SEARCH_STEPS):
        if problem.num_bins - used <= _FEW_MISSING * problem.num_bins or high - low <= 1:
            break
        # Bins needed go about inversely with the cap, so this guess is close at once.
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
        count = problem.num_bins - first
        # One rank and equal targets: plain longest-processing-time over these bins.
        state = LptState.empty(num_ranks=1, num_slots=count, cap=problem.cap, targets=[0] * count)
        placed = run_lpt(problem.lengths[moving], problem.costs[moving], state, problem.cap)
        if placed is not None:
            shared = bin_of.copy()
            shared[moving] = placed + first
            return shared
    return bin_of
