"""One optimizer step: static, plain or balanced packing, and how good the outcome is.

Invariants: the number of micro-batches is a multiple of the alignment; every bin without samples is
a filler; the cap holds in every mode.

Axis letters: N samples of the step, D ranks, M slots, K = D * M bins, numbered rank by rank.
"""

from dataclasses import dataclass

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing import Assignment, balance_step
from rl_schedule.balancing.bounds import cost_bounds, micro_batch_bound, rank_bound, slot_bound
from rl_schedule.balancing.rank_assignment import arrange_slots, deal_bins, deal_in_turn
from rl_schedule.cost import integer_costs, mean_cost
from rl_schedule.errors import InfeasibleScheduleError
from rl_schedule.packing import align_bins, bin_sums, decreasing_order, fill_first_fit, round_up
from rl_schedule.request import ScheduleRequest
from rl_schedule.statistics import StepStats, rank_imbalance, slot_imbalance

__all__ = ["PlannedStep", "plan_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step's samples, where each of them runs, and the figures."""

    members: IntArray
    """int64 [N]: rollout positions of the step, in rollout order."""
    assignment: Assignment
    """Micro-batch of each member."""
    stats: StepStats
    """Figures of the step."""


def plan_step(
    request: ScheduleRequest,
    number: int,
    members: IntArray,
    all_lengths: IntArray,
    *,
    num_rollouts: int,
) -> PlannedStep:
    """Pack, align, deal and measure one step.

    Args:
        request: the settings.
        number: the step, for messages.
        members: rollout positions of the step, in rollout order.
        all_lengths: int64, padded tokens of every rollout position.
        num_rollouts: rollouts of the step.

    Raises:
        InfeasibleScheduleError: fillers are needed and `on_misaligned` is `"error"`.
        ScheduleError: the cost model returns something that is no cost, or costs add up beyond
            float64.
    """
    lengths = all_lengths[members]
    weights = request.costs_of(members)
    costs = integer_costs(weights, terms=lengths.size + request.alignment)
    levelled = lengths if request.balance == "tokens" else costs
    # A cap above the tokens of the step means the same and could overflow a product.
    cap = None if request.token_cap is None else min(request.token_cap, int(lengths.sum()))
    if cap is None or request.balance == "none":
        assignment = _pack_in_order(request, number, lengths, levelled, cap)
    else:
        assignment = balance_step(
            lengths,
            levelled,
            cap=cap,
            num_ranks=request.dp_size,
            alignment=request.alignment,
            rank_slack=request.rank_slack,
            may_grow=request.extra_micro_batches == "auto",
        )
        # Balanced packing leaves no bin empty while there are samples enough.
        _check_fillers(
            request, number, lengths.size, lengths.size, assignment.num_slots * request.dp_size
        )
    mean = mean_cost(weights, parts=request.dp_size)
    stats = _measure(
        request, assignment, lengths, costs, cap, num_rollouts=num_rollouts, mean_rank_cost=mean
    )
    return PlannedStep(members=members, assignment=assignment, stats=stats)


def _pack_in_order(
    request: ScheduleRequest, number: int, lengths: IntArray, levelled: IntArray, cap: int | None
) -> Assignment:
    """Pack samples as they come: chunks of equal count, or first fit under the cap; then deal."""
    if cap is None:
        bins = np.arange(lengths.size, dtype=np.int64) // (request.micro_batch_size or 1)
    else:
        bins = np.asarray(fill_first_fit(lengths.tolist(), cap), dtype=np.int64)
    needed = round_up(int(bins.max()) + 1, request.alignment)
    if cap is not None:
        # Chunks are not split: static packing has a short last one, and fillers.
        bins = align_bins(bins, lengths, needed)
    path = "static" if cap is None else "first_fit"
    _check_fillers(request, number, lengths.size, int(bins.max()) + 1, needed)
    ranks, slots = request.dp_size, needed // request.dp_size
    if request.balance == "none":
        strided = deal_in_turn(bins, num_ranks=ranks, num_slots=slots)
        return Assignment(bin_of=strided, num_slots=slots, path=f"{path}|strided")
    dealt = deal_bins(bins, levelled, num_ranks=ranks, num_bins=needed)
    arranged = arrange_slots(dealt, levelled, num_ranks=ranks, num_slots=slots)
    return Assignment(bin_of=arranged, num_slots=slots, path=f"{path}|kk")


def _check_fillers(
    request: ScheduleRequest, number: int, num_samples: int, packed: int, needed: int
) -> None:
    """Raise if the policy forbids the fillers that missing micro-batches would be."""
    if request.on_misaligned == "error" and packed < needed:
        raise InfeasibleScheduleError(
            f"step {number} has {num_samples} samples in {packed} micro-batches but needs {needed}"
            f" (a multiple of {request.alignment} = ranks times pipeline group) and on_misaligned"
            ' is "error"; use fewer ranks, more samples, or on_misaligned="split_then_filler"'
        )


def _measure(
    request: ScheduleRequest,
    assignment: Assignment,
    lengths: IntArray,
    costs: IntArray,
    cap: int | None,
    *,
    num_rollouts: int,
    mean_rank_cost: float,
) -> StepStats:
    """Compute the figures of a step and what no plan can beat."""
    ranks, slots = request.dp_size, assignment.num_slots
    cost_DM = bin_sums(costs, assignment.bin_of, ranks * slots).reshape(ranks, slots)
    tokens, imbalance = int(lengths.sum()), rank_imbalance(cost_DM)
    if cap is None:
        least = -(-lengths.size // (request.micro_batch_size or 1))
        lowest_rank = max(1.0, int(costs.max()) / (int(costs.sum()) / ranks or 1))
        lowest_slot = imbalance
    else:
        least = micro_batch_bound(lengths, cap)
        lowest_rank = rank_bound(lengths, costs, cap, num_ranks=ranks, num_slots=slots)
        order = decreasing_order(lengths)
        bounds = cost_bounds(lengths[order], costs[order], cap, num_ranks=ranks, num_slots=slots)
        lowest_slot = max(imbalance, slot_bound(bounds, rank_limit=imbalance))
    return StepStats(
        num_rollouts=num_rollouts,
        num_samples=int(lengths.size),
        num_tokens=tokens,
        micro_batches=slots,
        micro_batch_bound=round_up(least, request.alignment) // ranks,
        fillers=int(np.count_nonzero(np.bincount(assignment.bin_of, minlength=ranks * slots) == 0)),
        fill=None if request.token_cap is None else tokens / (ranks * slots * request.token_cap),
        rank_imbalance=imbalance,
        rank_bound=lowest_rank,
        slot_imbalance=slot_imbalance(cost_DM),
        slot_bound=lowest_slot,
        rank_slack=assignment.rank_slack,
        path=assignment.path,
        mean_rank_cost=mean_rank_cost,
    )
