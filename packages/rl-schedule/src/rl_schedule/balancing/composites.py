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
from rl_schedule.bounds import common_level
from rl_schedule.dealing import bin_sums, number_bins
from rl_schedule.karmarkar_karp import deal_by_differencing
from rl_schedule.packing import fill_best_fit, group_bins

__all__ = ["pack_composites"]

_CAP_SEARCH_STEPS = 6
"""Halvings of the interval in which the smallest sufficient cap is sought: within 1.6 % of the interval."""

_FEW_MISSING = 0.003
"""Share of bins left empty by a packing at which no smaller cap is sought."""

_MANY_SAMPLES, _FEW_MISSING_OF_MANY = 50_000, 0.02
"""The share for steps of so many samples, where seeking costs more than it gives."""


def pack_composites(problem: StepProblem, *, num_long: int) -> IntArray | None:
    """Fit the ``num_long`` longest samples together, level and deal their bins, then place the rest by two-level LPT.

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
    fitted = _feed_empty_bins(fitted, costs, problem.num_bins)
    mean = int(problem.costs.sum()) // problem.num_bins
    fitted = level_bins(fitted, lengths, costs, cap=problem.cap, num_bins=problem.num_bins, level=mean)
    sums = bin_sums(costs, fitted, problem.num_bins)
    full, total = _when_full(problem, fitted, sums), int(problem.costs.sum())
    expected = np.minimum(full, common_level(full[:, None], sums, total))
    order = deal_by_differencing(expected, problem.num_ranks)
    order = np.take_along_axis(order, np.argsort(-sums[order], axis=1, kind="stable"), axis=1)
    place = np.empty(problem.num_bins, dtype=np.int64)
    place[order.ravel()] = np.arange(problem.num_bins)
    targets = common_level(full[order].T, sums[order].max(axis=0), total)
    return top_up(problem, place[fitted], targets)


def _fit_evenly(problem: StepProblem, num_long: int) -> IntArray | None:
    """Best-fit-decreasing under the smallest cap found that needs no more bins than there are; None if the cap is not enough.

    A smaller cap spreads the samples over as many bins as there are (the idea of MULTIFIT: Coffman, Garey and Johnson, 1978).
    """
    lengths = problem.lengths[:num_long].tolist()
    whole = num_long == problem.lengths.size
    best = problem.packings.best_fit if whole else np.asarray(fill_best_fit(lengths, problem.cap), dtype=np.int64)
    used = int(best.max()) + 1
    if used > problem.num_bins:
        return None
    low, high = sum(min(length, problem.cap) for length in lengths) // problem.num_bins, problem.cap
    allowed = (_FEW_MISSING if num_long <= _MANY_SAMPLES else _FEW_MISSING_OF_MANY) * problem.num_bins
    for _ in range(_CAP_SEARCH_STEPS):
        if problem.num_bins - used <= allowed or high - low <= 1:
            break
        middle = (low + high) // 2
        tried = fill_best_fit(lengths, middle)
        count = max(tried) + 1
        if count <= problem.num_bins:
            best, used, high = np.asarray(tried, dtype=np.int64), count, middle
        else:
            low = middle
    return best


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


def _when_full(problem: StepProblem, fitted: IntArray, sums: IntArray) -> IntArray:
    """Return what each bin costs when short samples, at their mean cost per token, use up its room: int64 [bins]."""
    num_long = fitted.size
    if num_long == problem.lengths.size:
        return sums
    rooms = problem.cap - bin_sums(problem.lengths[:num_long], fitted, problem.num_bins)
    rate = int(problem.costs[num_long:].sum()) / int(problem.lengths[num_long:].sum())
    full: IntArray = sums + np.floor(np.maximum(rooms, 0) * rate).astype(np.int64)
    return full
