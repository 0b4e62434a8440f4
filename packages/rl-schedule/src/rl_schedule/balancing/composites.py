"""Tight packings: long samples first fitted to one another, then dealt, then topped up with short ones; algorithm layer.

Decides where long samples go when a greedy pass cannot fit them, because a micro-batch holds only two or three of them
and the fit has to be tight. Invariants: the cap holds; exactly ``num_bins`` bins result; bounded by counts.
"""

import heapq

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.greedy import top_up
from rl_schedule.balancing.levelling import level_bins
from rl_schedule.balancing.problem import StepProblem
from rl_schedule.bounds import slot_targets
from rl_schedule.dealing import bin_sums, number_bins
from rl_schedule.karmarkar_karp import deal_by_differencing
from rl_schedule.packing import fill_best_fit, group_bins

__all__ = ["pack_composites"]

_CAP_SEARCH_STEPS = 6
"""Halvings of the interval in which the smallest sufficient cap is sought: within 1.6 % of the interval."""

_FEW_MISSING = 0.02
"""Share of bins left empty by a packing below which seeking a smaller cap costs more than it gives."""


def pack_composites(problem: StepProblem, *, num_long: int) -> IntArray | None:
    """Fit the ``num_long`` longest samples together, level and deal their bins, then place the rest by two-level LPT.

    Args:
        problem: the step.
        num_long: 1 to n; n fits all samples to one another.

    Returns:
        The rank-major bin of each sample, int64 [n], or None when they do not fit.
    """
    lengths, costs = problem.lengths[:num_long], problem.costs[:num_long]
    fitted = _fit_evenly(lengths, problem.cap, problem.num_bins)
    if fitted is None:
        return None
    fitted = _feed_empty_bins(fitted, costs, problem.num_bins)
    fitted = level_bins(fitted, lengths, costs, cap=problem.cap, num_bins=problem.num_bins)
    order = _deal(problem, fitted, num_long)
    place = np.empty(problem.num_bins, dtype=np.int64)
    place[order] = np.arange(problem.num_bins)
    return top_up(problem, place[fitted], slot_targets(problem.bounds()))


def _fit_evenly(lengths: IntArray, cap: int, num_bins: int) -> IntArray | None:
    """Best-fit-decreasing under the smallest cap found that needs at most ``num_bins`` bins; None if ``cap`` is not enough.

    A smaller cap spreads the samples over as many bins as there are (the idea of MULTIFIT: Coffman, Garey and Johnson, 1978).
    """
    given = lengths.tolist()
    best = fill_best_fit(given, cap)
    used = max(best) + 1
    if used > num_bins:
        return None
    low, high = int(np.minimum(lengths, cap).sum()) // num_bins, cap
    for _ in range(_CAP_SEARCH_STEPS):
        if num_bins - used <= _FEW_MISSING * num_bins or high - low <= 1:
            break
        middle = (low + high) // 2
        tried = fill_best_fit(given, middle)
        count = max(tried) + 1
        if count <= num_bins:
            best, used, high = tried, count, middle
        else:
            low = middle
    return np.asarray(best, dtype=np.int64)


def _feed_empty_bins(bin_of: IntArray, costs: IntArray, num_bins: int) -> IntArray:
    """Give each empty bin the cheapest sample of each of the two costliest bins that hold at least three."""
    sums = bin_sums(costs, bin_of, num_bins).tolist()
    counts = np.bincount(bin_of, minlength=num_bins)
    empty = np.flatnonzero(counts == 0).tolist()
    if not empty:
        return bin_of
    members = group_bins(bin_of, num_bins)
    donors = [(-sums[number], number) for number in np.flatnonzero(counts >= 3).tolist()]
    heapq.heapify(donors)
    for target in empty:
        for _ in range(min(2, len(donors))):
            _, donor = heapq.heappop(donors)
            sample = members[donor].pop()
            members[target].append(sample)
            sums[donor] -= int(costs[sample])
            if len(members[donor]) >= 3:
                heapq.heappush(donors, (-sums[donor], donor))
    return number_bins(members, bin_of.size)


def _deal(problem: StepProblem, fitted: IntArray, num_long: int) -> IntArray:
    """Deal bins to ranks by the cost they will have once short samples have topped them up; bins in rank-major order.

    A bin of cost c and room w ends at max(c, min(c + a * w, W)): a is the short samples' cost per token, W the water level
    at which the expected costs add up to the total.
    """
    sums = bin_sums(problem.costs[:num_long], fitted, problem.num_bins)
    expected = sums
    if num_long < problem.lengths.size:
        rooms = problem.cap - bin_sums(problem.lengths[:num_long], fitted, problem.num_bins)
        rate = int(problem.costs[num_long:].sum()) / int(problem.lengths[num_long:].sum())
        full = sums + np.floor(np.maximum(rooms, 0) * rate).astype(np.int64)
        low, high = 0, int(problem.costs.sum())
        total = high
        while high - low > 1:
            level = (low + high) // 2
            held = int(np.maximum(sums, np.minimum(full, level)).sum())
            low, high = (low, level) if held >= total else (level, high)
        expected = np.maximum(sums, np.minimum(full, high))
    return deal_by_differencing(expected, problem.num_ranks).ravel()
