"""From finished micro-batches to ranks, and the order of each rank's micro-batches.

Invariants: every rank gets the same number; a rank's micro-batches are put into slots by descending
cost, which minimises the slot sum for given ranks; the permutation that then moves costly slots
away from the pipeline's ends is common to all ranks, so no figure changes.

Axis letters: N samples, K = D * M bins, D ranks, M slots; bins are numbered rank by rank.
"""

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.packing import bin_sums, deal_by_differencing

__all__ = [
    "arrange_slots",
    "deal_bins",
    "deal_in_turn",
    "fill_empty_bins",
    "pipeline_order",
    "renumber_bins",
]


def renumber_bins(bin_of: IntArray, order: IntArray) -> IntArray:
    """Number bins anew: the one at place p of `order` (any shape, row by row) becomes bin p.

    Example: samples in bins [0, 1, 2, 2], order [2, 0, 1]: bin 2 becomes 0, so [1, 2, 0, 0].
    """
    # `order` says which bin stands at a place. The argsort of a permutation is its inverse, and
    # says at which place a bin stands, which is its new number.
    place_K = np.argsort(order, axis=None)
    return place_K[bin_of]


def deal_in_turn(bin_of: IntArray, *, num_ranks: int, num_slots: int) -> IntArray:
    """Deal bins to ranks like cards, bin b to rank b mod D; the rank-major bin of each sample."""
    return bin_of % num_ranks * num_slots + bin_of // num_ranks


def deal_bins(bin_of: IntArray, costs: IntArray, *, num_ranks: int, num_bins: int) -> IntArray:
    """Deal bins to ranks by largest differencing: the rank-major bin of each sample, int64 [N]."""
    bins_DM = deal_by_differencing(bin_sums(costs, bin_of, num_bins), num_ranks)
    return renumber_bins(bin_of, bins_DM)


def fill_empty_bins(
    bin_of: IntArray, costs: IntArray, *, num_ranks: int, num_bins: int
) -> IntArray:
    """Give every empty bin one sample as long as some bin holds two: int64 [N]; O(N log N).

    The cheapest samples of the bin's own rank are spared first, which leaves the ranks as they are;
    where a rank has none to spare, the cheapest of the costliest ranks.
    """
    counts_K = np.bincount(bin_of, minlength=num_bins)
    empty = np.flatnonzero(counts_K == 0)
    # With no sample for each bin some stay empty whatever is moved; they become fillers.
    if not empty.size or empty.size + bin_of.size <= num_bins:
        return bin_of
    num_slots = num_bins // num_ranks
    filled, left_K = bin_of.copy(), counts_K.tolist()
    waiting: dict[int, list[int]] = {}
    for target in empty.tolist():
        waiting.setdefault(target // num_slots, []).append(target)

    def spare(sample: int, targets: list[int]) -> None:
        """Move a sample into the first of `targets`, unless it is alone or nothing waits."""
        if targets and left_K[filled[sample]] > 1:
            left_K[filled[sample]] -= 1
            filled[sample] = targets.pop(0)
            left_K[filled[sample]] += 1

    own = np.flatnonzero(np.isin(filled // num_slots, list(waiting)))
    for sample in own[np.argsort(costs[own], kind="stable")].tolist():
        spare(sample, waiting[int(filled[sample]) // num_slots])
    rest = [target for targets in waiting.values() for target in targets]
    if rest:
        load_D = bin_sums(costs, filled // num_slots, num_ranks)
        # lexsort's last key counts first: costliest rank, then cheapest sample.
        for sample in np.lexsort((costs, -load_D[filled // num_slots])).tolist():
            spare(sample, rest)
    return filled


def pipeline_order(num_slots: int) -> IntArray:
    """Return the cost rank of the slot at each place of the pipeline: cheapest at both ends.

    Place the costliest in the middle and go outwards. Example: 5 slots give ranks [3, 1, 0, 2, 4].
    """
    # Odd cost ranks, descending towards the middle, then even ones, ascending from it.
    return np.concatenate([np.arange(1, num_slots, 2)[::-1], np.arange(0, num_slots, 2)])


def arrange_slots(bin_of: IntArray, costs: IntArray, *, num_ranks: int, num_slots: int) -> IntArray:
    """Renumber bins inside each rank: slot by cost alike on all ranks, in `pipeline_order`."""
    cost_DM = bin_sums(costs, bin_of, num_ranks * num_slots).reshape(num_ranks, num_slots)
    costliest_first_DM = np.argsort(-cost_DM, axis=1, kind="stable")
    # argsort numbers a rank's bins from 0; its first bin has the number rank * M.
    first_bin_D1 = np.arange(num_ranks)[:, None] * num_slots
    return renumber_bins(bin_of, costliest_first_DM[:, pipeline_order(num_slots)] + first_bin_D1)
