"""One optimizer step: which mode packs it, and how good the outcome is; algorithm layer, below
`schedule`.

Decides between static, plain and balanced packing. Invariants: the number of micro-batches is a
multiple of the alignment; every bin without samples is a filler; the cap holds in every mode.
"""

import math
from dataclasses import dataclass

import numpy as np

from rl_schedule.alignment import refuse_fillers, round_up, split_bins
from rl_schedule.arrays import IntArray
from rl_schedule.assignment import Assignment
from rl_schedule.balancing import balance_step
from rl_schedule.bounds import cost_bounds, micro_batch_bound, rank_bound, slot_bound
from rl_schedule.cost import evaluate_cost, integer_costs
from rl_schedule.dealing import arrange_slots, bin_sums, deal_bins, number_bins
from rl_schedule.packing import decreasing_order, fill_first_fit, group_bins
from rl_schedule.request import ScheduleRequest
from rl_schedule.statistics import StepStats, rank_imbalance, slot_imbalance

__all__ = ["PlannedStep", "plan_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step's samples, where each of them runs, and the figures."""

    members: IntArray
    """int64 [n]: rollout positions of the step, in rollout order."""
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
        ScheduleError: the cost model returns something that is no cost.
    """
    lengths = all_lengths[members]
    weights = evaluate_cost(request.cost_model, lengths)
    costs = integer_costs(weights, terms=lengths.size + request.alignment)
    levelled = lengths if request.balance == "tokens" else costs
    assignment = _assign(request, number, lengths, levelled)
    mean = math.fsum(weights.tolist()) / request.dp_size
    stats = _measure(
        request, assignment, lengths, costs, num_rollouts=num_rollouts, mean_rank_cost=mean
    )
    return PlannedStep(members=members, assignment=assignment, stats=stats)


def _step_cap(request: ScheduleRequest, lengths: IntArray) -> int | None:
    """Return the token cap, at most the tokens of the step: a larger one means the same and could overflow a product."""
    return None if request.token_cap is None else min(request.token_cap, int(lengths.sum()))


def _assign(
    request: ScheduleRequest, number: int, lengths: IntArray, levelled: IntArray
) -> Assignment:
    cap = _step_cap(request, lengths)
    if cap is not None and request.balance != "none":
        assignment = balance_step(
            lengths,
            levelled,
            cap=cap,
            num_ranks=request.dp_size,
            alignment=request.alignment,
            rank_slack=request.rank_slack,
        )
        _check_fillers(
            request, number, lengths.size, lengths.size, assignment.num_slots * request.dp_size
        )
        return assignment
    bins, packed, needed, path = _pack_in_order(request, lengths)
    _check_fillers(request, number, lengths.size, packed, needed)
    num_slots = needed // request.dp_size
    if request.balance == "none":
        placed, path = (
            bins % request.dp_size * num_slots + bins // request.dp_size,
            f"{path}|strided",
        )
    else:
        dealt = deal_bins(bins, levelled, num_ranks=request.dp_size, num_bins=needed)
        placed, path = (
            arrange_slots(dealt, levelled, num_ranks=request.dp_size, num_slots=num_slots),
            f"{path}|kk",
        )
    return Assignment(bin_of=placed, num_ranks=request.dp_size, num_slots=num_slots, path=path)


def _pack_in_order(request: ScheduleRequest, lengths: IntArray) -> tuple[IntArray, int, int, str]:
    """Pack samples as they come: the bin of each, how many there are, how many are needed, and the path."""
    if request.micro_batch_size is not None:
        chunks = (np.arange(lengths.size) // request.micro_batch_size).astype(np.int64)
        packed = -(-lengths.size // request.micro_batch_size)
        return chunks, packed, round_up(packed, request.alignment), "static"
    bins = group_bins(
        np.asarray(
            fill_first_fit(lengths.tolist(), _step_cap(request, lengths) or 0), dtype=np.int64
        )
    )
    needed = round_up(len(bins), request.alignment)
    split = split_bins(bins, lengths.tolist(), needed)
    return number_bins(split, lengths.size), len(split), needed, "first_fit"


def _check_fillers(
    request: ScheduleRequest, number: int, num_samples: int, packed: int, needed: int
) -> None:
    refuse_fillers(
        request.on_misaligned,
        step=number,
        num_samples=num_samples,
        packed=packed,
        needed=needed,
        alignment=request.alignment,
    )


def _measure(
    request: ScheduleRequest,
    assignment: Assignment,
    lengths: IntArray,
    costs: IntArray,
    *,
    num_rollouts: int,
    mean_rank_cost: float,
) -> StepStats:
    ranks, slots, cap = assignment.num_ranks, assignment.num_slots, _step_cap(request, lengths)
    bin_costs = bin_sums(costs, assignment.bin_of, ranks * slots).reshape(ranks, slots)
    tokens, imbalance = int(lengths.sum()), rank_imbalance(bin_costs)
    if cap is None:
        least = -(-lengths.size // (request.micro_batch_size or 1))
        lowest_rank, lowest_slot = (
            max(1.0, int(costs.max()) / (int(costs.sum()) / ranks or 1)),
            imbalance,
        )
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
        slot_imbalance=slot_imbalance(bin_costs),
        slot_bound=lowest_slot,
        rank_slack=assignment.rank_slack,
        path=assignment.path,
        mean_rank_cost=mean_rank_cost,
    )
