"""Balanced dynamic packing of one step: fewest micro-batches, level ranks, level slots; algorithm layer.

Decides the micro-batch and the rank of every sample under the token cap. Invariants: the cap holds; no more
micro-batches than first-fit-decreasing needs, rounded up to the alignment; no micro-batch is empty when there are
enough samples; P10.
"""

import numpy as np

from rl_schedule.alignment import round_up, split_bins
from rl_schedule.arrays import IntArray
from rl_schedule.assignment import Assignment
from rl_schedule.bounds import cost_bounds, micro_batch_bound, slot_targets
from rl_schedule.dealing import arrange_slots, bin_sums, deal_bins, fill_empty_bins, number_bins
from rl_schedule.packing import decreasing_order, fill_first_fit, group_bins
from rl_schedule.two_level import LptState, two_level_lpt

__all__ = ["balance_step"]

_LEVEL = 1.001
"""Ranks this close to the mean cannot be worse than any reference by the 0.1 % of P10."""


def balance_step(lengths: IntArray, costs: IntArray, *, cap: int, num_ranks: int, alignment: int, rank_slack: float | str) -> Assignment:
    """Assign the samples of one step.

    Args:
        lengths: int64 [n], padded tokens.
        costs: int64 [n].
        cap: tokens per micro-batch.
        num_ranks: ranks.
        alignment: the micro-batch count is a multiple of this.
        rank_slack: see ``ScheduleRequest``.
    """
    order = decreasing_order(lengths)
    sorted_lengths, sorted_costs = lengths[order], costs[order]
    chosen, count, path = _pack(sorted_lengths, sorted_costs, cap, num_ranks, alignment)
    chosen = fill_empty_bins(chosen, sorted_costs, num_ranks=num_ranks, num_bins=count)
    if _heaviest(chosen, sorted_costs, num_ranks, count) * num_ranks > _LEVEL * int(costs.sum()):
        chosen, path = _never_worse_than_strided(chosen, path, sorted_lengths, sorted_costs, cap, num_ranks, count)
    bin_of = np.empty(lengths.size, dtype=np.int64)
    bin_of[order] = chosen
    bin_of = arrange_slots(bin_of, costs, num_ranks=num_ranks, num_slots=count // num_ranks)
    return Assignment(bin_of=bin_of, num_ranks=num_ranks, num_slots=count // num_ranks, path=path)


def _pack(lengths: IntArray, costs: IntArray, cap: int, num_ranks: int, alignment: int) -> tuple[IntArray, int, str]:
    """Return rank-major bins, their number and the path."""
    least = round_up(micro_batch_bound(lengths, cap), alignment)
    chosen = _attempt(lengths, costs, cap, num_ranks, least)
    if chosen is not None:
        return chosen, least, "lpt"
    bins = np.asarray(fill_first_fit(lengths.tolist(), cap), dtype=np.int64)
    count = round_up(int(bins.max()) + 1, alignment)
    if count > least:
        chosen = _attempt(lengths, costs, cap, num_ranks, count)
    if chosen is not None:
        return chosen, count, "lpt"
    split = number_bins(split_bins(group_bins(bins), lengths.tolist(), count), bins.size)
    return deal_bins(split, costs, num_ranks=num_ranks, num_bins=count), count, "first_fit_decreasing|kk"


def _heaviest(bin_of: IntArray, costs: IntArray, num_ranks: int, num_bins: int) -> int:
    return int(bin_sums(costs, bin_of, num_bins).reshape(num_ranks, -1).sum(axis=1).max())


def _never_worse_than_strided(
    chosen: IntArray, path: str, lengths: IntArray, costs: IntArray, cap: int, num_ranks: int, count: int
) -> tuple[IntArray, str]:
    """Return the better of ``chosen`` and first-fit-decreasing bins dealt in turn (P10)."""
    bins = group_bins(np.asarray(fill_first_fit(lengths.tolist(), cap), dtype=np.int64))
    if len(bins) > count:
        return chosen, path
    split = number_bins(split_bins(bins, lengths.tolist(), count), lengths.size)
    strided = split % num_ranks * (count // num_ranks) + split // num_ranks
    better = _heaviest(strided, costs, num_ranks, count) < _heaviest(chosen, costs, num_ranks, count)
    return (strided, "first_fit_decreasing|strided") if better else (chosen, path)


def _attempt(lengths: IntArray, costs: IntArray, cap: int, num_ranks: int, count: int) -> IntArray | None:
    slots = count // num_ranks
    targets = slot_targets(cost_bounds(lengths, costs, cap, num_ranks=num_ranks, num_slots=slots))
    state = LptState.empty(num_ranks=num_ranks, num_slots=slots, cap=cap, targets=targets)
    chosen = two_level_lpt(lengths.tolist(), costs.tolist(), state, cap)
    return None if chosen is None else np.asarray(chosen, dtype=np.int64)
