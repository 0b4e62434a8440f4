"""From finished micro-batches to ranks, and the order of each rank's micro-batches; algorithm
layer.

Decides which rank runs which micro-batch and in which slot. Invariants: every rank gets the same
number; a rank's micro-batches are put into slots by descending cost, which minimises the slot sum
for given ranks; the permutation that then moves costly slots away from the pipeline's ends is
common to all ranks, so no figure changes.
"""

from itertools import chain

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.karmarkar_karp import deal_by_differencing

__all__ = [
    "arrange_slots",
    "bin_sums",
    "deal_bins",
    "fill_empty_bins",
    "number_bins",
    "pipeline_order",
]


def bin_sums(values: IntArray, bin_of: IntArray, num_bins: int) -> IntArray:
    """Sum `values` [n] per bin: int64 [num_bins], exact."""
    sums = np.zeros(num_bins, dtype=np.int64)
    np.add.at(sums, bin_of, values)
    return sums


def number_bins(bins: list[list[int]], num_samples: int) -> IntArray:
    """Return the bin of each sample, int64 [num_samples], from the samples of each bin."""
    bin_of = np.empty(num_samples, dtype=np.int64)
    members = np.fromiter(chain.from_iterable(bins), dtype=np.int64, count=num_samples)
    bin_of[members] = np.repeat(np.arange(len(bins)), [len(one) for one in bins])
    return bin_of


def deal_bins(bin_of: IntArray, costs: IntArray, *, num_ranks: int, num_bins: int) -> IntArray:
    """Deal `num_bins` bins to ranks by largest differencing: the rank-major bin of each sample, int64 [n]."""
    hands = deal_by_differencing(bin_sums(costs, bin_of, num_bins), num_ranks)
    place = np.empty(num_bins, dtype=np.int64)
    place[hands.ravel()] = np.arange(num_bins)
    dealt: IntArray = place[bin_of]
    return dealt


def fill_empty_bins(
    bin_of: IntArray, costs: IntArray, *, num_ranks: int, num_bins: int
) -> IntArray:
    """Give every empty bin one sample as long as some bin holds two: int64 [n]; O(n log n).

    The cheapest samples of the bin's own rank are spared first, which leaves the ranks as they are;
    where a rank has none to spare, the cheapest of the costliest ranks.
    """
    counts = np.bincount(bin_of, minlength=num_bins)
    empty = np.flatnonzero(counts == 0)
    if not empty.size or empty.size + bin_of.size <= num_bins:
        return bin_of
    slots = num_bins // num_ranks
    filled, left = bin_of.copy(), counts.tolist()
    waiting: dict[int, list[int]] = {}
    for target in empty.tolist():
        waiting.setdefault(target // slots, []).append(target)
    own = np.flatnonzero(np.isin(filled // slots, list(waiting)))
    for sample in own[np.argsort(costs[own], kind="stable")].tolist():
        targets = waiting[int(filled[sample]) // slots]
        if targets and left[filled[sample]] > 1:
            _spare(sample, targets.pop(0), filled, left)
    rest = [target for targets in waiting.values() for target in targets]
    if rest:
        loads = bin_sums(costs, filled // slots, num_ranks)
        for sample in np.lexsort((costs, -loads[filled // slots])).tolist():
            if rest and left[filled[sample]] > 1:
                _spare(sample, rest.pop(0), filled, left)
    return filled


def _spare(sample: int, target: int, filled: IntArray, left: list[int]) -> None:
    left[filled[sample]] -= 1
    left[target] += 1
    filled[sample] = target


def pipeline_order(num_slots: int) -> IntArray:
    """Return the cost rank of the slot at each place of the pipeline, int64 [m]: cheapest at both
    ends.

    Place the costliest in the middle and go outwards. Example: 5 slots give ranks [3, 1, 0, 2, 4].
    """
    order: IntArray = np.concatenate([np.arange(1, num_slots, 2)[::-1], np.arange(0, num_slots, 2)])
    return order


def arrange_slots(bin_of: IntArray, costs: IntArray, *, num_ranks: int, num_slots: int) -> IntArray:
    """Renumber bins inside each rank so that slot k of all ranks holds their k-th costliest, then apply `pipeline_order`."""
    sums = bin_sums(costs, bin_of, num_ranks * num_slots).reshape(num_ranks, num_slots)
    by_cost = np.argsort(-sums, axis=1, kind="stable")
    order = by_cost[:, pipeline_order(num_slots)] + np.arange(num_ranks)[:, None] * num_slots
    place = np.empty(num_ranks * num_slots, dtype=np.int64)
    place[order.ravel()] = np.arange(num_ranks * num_slots)
    arranged: IntArray = place[bin_of]
    return arranged
