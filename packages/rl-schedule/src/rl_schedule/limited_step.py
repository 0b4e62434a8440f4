"""One optimizer step whose micro-batches keep more than a token cap.

Units that stay together, at most so many samples, the padded footprint, equal samples per rank. A
step that balanced packing solves within the limits is solved by it; else units are dealt by cost
under the limits, and bins of first fit are the fallback.

Invariants: those of `planned_step`; every limit of the request holds.

Axis letters: N samples of the step, U units, D ranks, M slots, K = D * M bins, numbered rank by
rank.
"""

import heapq
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import IntArray
from rl_schedule.balancing import Assignment, balance_step
from rl_schedule.balancing.bounds import micro_batch_bound
from rl_schedule.balancing.rank_assignment import (
    arrange_slots,
    deal_bins,
    deal_in_turn,
    fill_empty_bins,
    renumber_bins,
)
from rl_schedule.cost import integer_costs, mean_cost
from rl_schedule.errors import InfeasibleScheduleError
from rl_schedule.packing import (
    Limits,
    Units,
    bin_sums,
    deal_by_differencing,
    decreasing_order,
    fill_limited,
    level_hands,
    round_up,
    split_limited,
)
from rl_schedule.planned_step import PlannedStep
from rl_schedule.request import ScheduleRequest
from rl_schedule.statistics import StepStats, rank_imbalance, slot_imbalance

__all__ = ["limits_of", "padded_costs", "plan_limited_step", "strided_bins"]

_LEVEL_RANKS = 1.001
"""Ranks this close to the mean need no other candidate."""


def plan_limited_step(
    request: ScheduleRequest,
    number: int,
    members: IntArray,
    all_lengths: IntArray,
    *,
    num_rollouts: int,
) -> PlannedStep:
    """Pack, align, deal and measure one step of a request that `has_limits`.

    Args:
        request: the settings.
        number: the step, for messages.
        members: rollout positions of the step, in rollout order.
        all_lengths: int64, padded tokens of every rollout position.
        num_rollouts: rollouts of the step.

    Raises:
        InfeasibleScheduleError: fillers are needed and `on_misaligned` is `"error"`, or the
            samples, or the groups of one size, do not divide among ranks that shall have equally
            many.
        ScheduleError: the cost model returns something that is no cost, or costs add up beyond
            float64.
    """
    lengths = all_lengths[members]
    kept = None if request.keep_together is None else np.asarray(request.keep_together)[members]
    units, limits = Units.of_samples(lengths, kept), limits_of(request)
    weights = request.costs_of(members)
    costs = integer_costs(weights, terms=members.size + request.alignment)
    levelled = lengths if request.balance == "tokens" else costs
    # Padded, a micro-batch costs its costliest sample times the count, at most that of all.
    unit_costs = _unit_costs(units, levelled, limits)
    deal = _deal_equally if request.equal_samples else _pack
    found = deal(request, number, units, unit_costs, limits)
    assignment = replace(found, bin_of=found.bin_of[units.of])
    mean = mean_cost(weights, parts=request.dp_size)
    stats = _measure(
        request, assignment, units, costs, num_rollouts=num_rollouts, mean_rank_cost=mean
    )
    _check_fillers(request, number, stats)
    return PlannedStep(members=members, assignment=assignment, stats=stats)


def limits_of(request: ScheduleRequest) -> Limits:
    """Return what one micro-batch of `request` may hold."""
    static = request.micro_batch_size is not None
    return Limits(
        most_tokens=request.token_cap,
        most_samples=request.micro_batch_size if static else request.max_samples_per_micro_batch,
        padded=request.pad_to_longest,
        in_order=static,
    )


def padded_costs(bin_of: IntArray, costs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return what samples cost that are padded to the costliest one of their bin, [N]."""
    costliest = np.zeros(int(bin_of.max(initial=-1)) + 1, dtype=costs.dtype)
    np.maximum.at(costliest, bin_of, costs)
    return costliest[bin_of]


def strided_bins(units: Units, limits: Limits, *, num_ranks: int, num_bins: int) -> IntArray | None:
    """Return first-fit-decreasing bins under the limits, split and dealt in turn: int64 [U].

    Returns:
        None where they are more than `num_bins`.
    """
    bins = fill_limited(units, _longest_first(units, limits), limits)
    if int(bins.max()) >= num_bins:
        return None
    split = split_limited(bins, units, limits, num_bins)
    return deal_in_turn(split, num_ranks=num_ranks, num_slots=num_bins // num_ranks)


def _unit_costs(units: Units, costs: IntArray, limits: Limits) -> IntArray:
    """Return what each unit costs alone in a micro-batch, int64 [U]."""
    if not limits.padded:
        return bin_sums(costs, units.of, units.first.size)
    costliest = np.zeros(units.first.size, dtype=np.int64)
    np.maximum.at(costliest, units.of, costs)
    return costliest * units.counts


def _pack(
    request: ScheduleRequest, number: int, units: Units, costs: IntArray, limits: Limits
) -> Assignment:
    """Assign units under the limits, to as few micro-batches as packing or first fit finds."""
    del number
    ranks = request.dp_size
    plain = request.balance == "none" or limits.in_order
    order = np.arange(units.first.size) if plain else _longest_first(units, limits)
    bins = fill_limited(units, order, limits)
    slots = round_up(int(bins.max()) + 1, request.alignment) // ranks
    split = bins if limits.in_order else split_limited(bins, units, limits, slots * ranks)
    strided = deal_in_turn(split, num_ranks=ranks, num_slots=slots)
    candidates = [Assignment(bin_of=strided, num_slots=slots, path="limited|strided")]
    if request.balance == "none":
        return candidates[0]
    balanced = None if plain else _balanced(request, units, costs, limits)
    if balanced is not None and (balanced.num_slots < slots or _is_level(balanced, costs, ranks)):
        return balanced
    if balanced is not None and balanced.num_slots == slots:
        candidates.append(balanced)
    least = round_up(max(_least_bins(limits, units)), request.alignment) // ranks
    # Mixing long and short wastes less of a number of samples than first fit does.
    for fewer in sorted({least, slots - request.alignment // ranks}):
        bins_of_fewer = (
            _deal_by_cost(units, costs, limits, ranks, fewer) if least <= fewer < slots else None
        )
        if bins_of_fewer is not None:
            found = Assignment(bin_of=bins_of_fewer, num_slots=fewer, path="limited|lpt")
            return _arranged(found, units, costs, limits, ranks)
    shown = _shown(split, costs, units, limits)
    dealt = _level_bins(
        deal_bins(split, shown, num_ranks=ranks, num_bins=slots * ranks), shown, ranks, slots
    )
    candidates.append(Assignment(bin_of=dealt, num_slots=slots, path="limited|kk"))
    by_cost = _deal_by_cost(units, costs, limits, ranks, slots)
    if by_cost is not None:
        candidates.append(Assignment(bin_of=by_cost, num_slots=slots, path="limited|lpt"))

    def figures(found: Assignment) -> tuple[int, int]:
        spent = _shown(found.bin_of, costs, units, limits)
        cost_DM = bin_sums(spent, found.bin_of, ranks * slots).reshape(ranks, slots)
        return int(cost_DM.sum(axis=1).max()), int(np.sort(cost_DM, axis=1).max(axis=0).sum())

    best = min(candidates, key=figures)
    return best if best is balanced else _arranged(best, units, costs, limits, ranks)


def _balanced(
    request: ScheduleRequest, units: Units, costs: IntArray, limits: Limits
) -> Assignment | None:
    """Balance units as if they were samples; None where that breaks a limit."""
    if limits.padded or limits.most_tokens is None:
        return None
    found = balance_step(
        units.tokens,
        costs,
        cap=min(limits.most_tokens, int(units.tokens.sum())),
        num_ranks=request.dp_size,
        alignment=request.alignment,
        rank_slack=request.rank_slack,
        may_grow=False,
    )
    counts_K = bin_sums(units.counts, found.bin_of, request.dp_size * found.num_slots)
    if int(counts_K.max()) > (limits.most_samples or units.of.size):
        return None
    return replace(found, path=f"units|{found.path}")


def _is_level(found: Assignment, costs: IntArray, num_ranks: int) -> bool:
    """Tell whether the costliest rank is within 0.1 % of the mean, where P10 cannot fail."""
    costliest = int(bin_sums(costs, found.bin_of // found.num_slots, num_ranks).max())
    return costliest * num_ranks <= _LEVEL_RANKS * int(costs.sum())


def _longest_first(units: Units, limits: Limits) -> IntArray:
    """Return units in packing order: most tokens first, or the longest sample first if padded."""
    return decreasing_order(units.longest if limits.padded else units.tokens)


def _level_bins(bin_of: IntArray, costs: IntArray, num_ranks: int, num_slots: int) -> IntArray:
    """Swap whole micro-batches between ranks until these are level: int64 [U]."""
    bins = np.arange(num_ranks * num_slots)
    spent = bin_sums(costs, bin_of, bins.size)
    rank_of = level_hands(spent, bins // num_slots, num_ranks, np.ones_like(bins))
    return renumber_bins(bin_of, np.argsort(rank_of, kind="stable"))


def _arranged(
    found: Assignment, units: Units, costs: IntArray, limits: Limits, num_ranks: int
) -> Assignment:
    """Order each rank's micro-batches by cost, alike on all ranks."""
    spent = _shown(found.bin_of, costs, units, limits)
    bin_of = arrange_slots(found.bin_of, spent, num_ranks=num_ranks, num_slots=found.num_slots)
    return replace(found, bin_of=bin_of)


def _shown(bin_of: IntArray, costs: IntArray, units: Units, limits: Limits) -> IntArray:
    """Return what each unit costs in its bin, int64 [U]."""
    if not limits.padded:
        return costs
    return padded_costs(bin_of, costs // units.counts) * units.counts


def _deal_by_cost(
    units: Units, costs: IntArray, limits: Limits, num_ranks: int, num_slots: int
) -> IntArray | None:
    """Give units, costliest first, to the cheapest rank with room, into its cheapest bin with room.

    None where a unit has no room left, or where micro-batches are padded: mixing lengths pads more.
    """
    if limits.padded or limits.in_order:
        return None
    content = np.zeros((4, num_ranks, num_slots), dtype=np.int64)
    tokens, longest, counts, spent = content
    heap = [(0, rank) for rank in range(num_ranks)]
    bin_of = np.empty(units.first.size, dtype=np.int64)
    for unit in np.lexsort((-units.tokens, -costs)).tolist():
        full: list[tuple[int, int]] = []
        room = np.zeros(num_slots, dtype=bool)
        while heap and not room.any():
            load, rank = heapq.heappop(heap)
            room = (counts[rank] == 0) | limits.fits(
                tokens[rank] + units.tokens[unit],
                np.maximum(longest[rank], units.longest[unit]),
                counts[rank] + units.counts[unit],
            )
            full.append((load, rank))
        if not room.any():
            return None
        load, rank = full.pop()
        slot = int(np.where(room, spent[rank], np.iinfo(np.int64).max).argmin())
        content[:, rank, slot] += (units.tokens[unit], 0, units.counts[unit], costs[unit])
        longest[rank, slot] = max(longest[rank, slot], units.longest[unit])
        bin_of[unit] = rank * num_slots + slot
        for entry in (*full, (load + int(costs[unit]), rank)):
            heapq.heappush(heap, entry)
    return fill_empty_bins(bin_of, costs, num_ranks=num_ranks, num_bins=num_ranks * num_slots)


def _deal_equally(
    request: ScheduleRequest, number: int, units: Units, costs: IntArray, limits: Limits
) -> Assignment:
    """Give every rank equally many samples, then pack each rank for itself."""
    ranks = request.dp_size
    rank_of = _equal_ranks(request, number, units, costs)
    plain = request.balance == "none" or limits.in_order
    order = np.arange(units.first.size) if plain else _longest_first(units, limits)
    packed = [fill_limited(units, order[rank_of[order] == r], limits) for r in range(ranks)]
    most = max(int(bins.max()) + 1 for bins in packed)
    slots = round_up(most, request.alignment // ranks)
    bin_of = np.empty_like(rank_of)
    for rank, bins in enumerate(packed):
        split = bins if limits.in_order else split_limited(bins, units, limits, slots)
        own = split >= 0
        bin_of[own] = rank * slots + split[own]
    if request.balance == "none":
        return Assignment(bin_of=bin_of, num_slots=slots, path="equal|strided")
    found = Assignment(bin_of=bin_of, num_slots=slots, path="equal|kk")
    return _arranged(found, units, costs, limits, ranks)


def _equal_ranks(request: ScheduleRequest, number: int, units: Units, costs: IntArray) -> IntArray:
    """Return the rank of each unit, int64 [U], so that every rank has equally many samples."""
    ranks = request.dp_size
    rank_of = np.empty(units.first.size, dtype=np.int64)
    load_D = np.zeros(ranks, dtype=np.int64)
    for size in np.unique(units.counts)[::-1].tolist():
        alike = np.flatnonzero(units.counts == size)
        if alike.size % ranks:
            kept = request.keep_together is not None
            what = f"units of {size} samples" if kept else "samples"
            wanted = (
                "groups of each size (keep_together) are dealt to the ranks in equal numbers, so"
                f" choose steps whose groups of {size} samples are a multiple of dp_size = {ranks}"
                if kept
                else "choose a global_batch_size whose samples are a multiple of dp_size"
            )
            raise InfeasibleScheduleError(
                f"step {number} has {alike.size} {what}, which {ranks} ranks cannot share equally"
                f" (equal_samples); {wanted}, or set equal_samples=False"
            )
        if request.balance == "none":
            rank_of[alike] = np.arange(alike.size) % ranks
            continue
        # Heaviest hand to the rank that has least so far.
        for hand, rank in zip(
            deal_by_differencing(costs[alike], ranks),
            np.argsort(load_D, kind="stable").tolist(),
            strict=True,
        ):
            rank_of[alike[hand]] = rank
            load_D[rank] += int(costs[alike[hand]].sum())
    if request.balance == "none":
        return rank_of
    return level_hands(costs, rank_of, ranks, units.counts)


def _check_fillers(request: ScheduleRequest, number: int, stats: StepStats) -> None:
    """Raise if the policy forbids the fillers of a step."""
    if request.on_misaligned == "error" and stats.fillers:
        raise InfeasibleScheduleError(
            f"step {number} has {stats.num_samples} samples in"
            f" {stats.micro_batches * request.dp_size - stats.fillers} micro-batches but needs"
            f" {stats.micro_batches * request.dp_size} (a multiple of {request.alignment} = ranks"
            ' times pipeline group) and on_misaligned is "error"; use fewer ranks, more samples, or'
            ' on_misaligned="split_then_filler"'
        )


def _least_bins(limits: Limits, units: Units) -> Iterator[int]:
    """Yield lower bounds on the micro-batches of a step."""
    if limits.most_tokens is not None:
        yield micro_batch_bound(units.tokens, min(limits.most_tokens, int(units.tokens.sum())))
    if limits.most_samples is not None:
        yield -(-units.of.size // limits.most_samples)


def _measure(
    request: ScheduleRequest,
    assignment: Assignment,
    units: Units,
    costs: IntArray,
    *,
    num_rollouts: int,
    mean_rank_cost: float,
) -> StepStats:
    """Compute the figures of a step and what no plan can beat."""
    ranks, slots, cap = request.dp_size, assignment.num_slots, request.token_cap
    shown = padded_costs(assignment.bin_of, costs) if request.pad_to_longest else costs
    cost_DM = bin_sums(shown, assignment.bin_of, ranks * slots).reshape(ranks, slots)
    tokens, imbalance = int(units.tokens.sum()), rank_imbalance(cost_DM)
    costliest = int(bin_sums(costs, units.of, units.first.size).max())
    # Padded, the total is the plan's own, and none is known of all plans.
    total = 0 if request.pad_to_longest else int(costs.sum())
    least = round_up(max(_least_bins(limits_of(request), units)), request.alignment)
    return StepStats(
        num_rollouts=num_rollouts,
        num_samples=int(units.of.size),
        num_tokens=tokens,
        micro_batches=slots,
        micro_batch_bound=least // ranks,
        fillers=int(np.count_nonzero(np.bincount(assignment.bin_of, minlength=ranks * slots) == 0)),
        fill=None if cap is None else tokens / (ranks * slots * cap),
        rank_imbalance=imbalance,
        rank_bound=max(1.0, costliest * ranks / total) if total else 1.0,
        slot_imbalance=slot_imbalance(cost_DM),
        slot_bound=imbalance,
        rank_slack=assignment.rank_slack,
        path=assignment.path,
        mean_rank_cost=mean_rank_cost,
    )
