"""All methods on one step, side by side: what other schedulers do, written here, and ours.

The plain methods all keep the token cap; they differ in how they pack and deal. No plan depends on
them.

Invariants: every method is measured with the same cost on the same padded lengths, and ends with
the same number of micro-batches on every rank.
"""

import time
from dataclasses import dataclass, replace

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.rank_assignment import arrange_slots, deal_bins, deal_in_turn
from rl_schedule.cost import integer_costs
from rl_schedule.packing import (
    align_bins,
    bin_sums,
    decreasing_order,
    fill_first_fit,
    round_up,
)
from rl_schedule.plan import SchedulePlan
from rl_schedule.request import Balance, RankSlack, ScheduleRequest
from rl_schedule.schedule import plan_schedule
from rl_schedule.statistics import rank_imbalance, slot_imbalance

__all__ = [
    "OURS",
    "REFERENCES",
    "MethodFigures",
    "compare_methods",
    "measure_plan",
    "measure_reference",
]


REFERENCES: tuple[tuple[str, bool, bool], ...] = (
    ("first-fit + strided", False, False),
    ("first-fit + KK", False, True),
    ("FFD + KK", True, True),
)
"""Published ways to pack and deal, naive first, strongest last.

Name; whether it packs longest first instead of in arrival order; whether it deals by Karmarkar-Karp
on costs, then sorts by cost, instead of dealing in turn.
"""

OURS: tuple[tuple[Balance, RankSlack], ...] = (("tokens", 0.0), ("flops", 0.0), ("flops", "auto"))
"""Settings of this package that a comparison shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFigures:
    """How one method does on one step."""

    method: str
    """Name for tables."""
    micro_batches: int
    """Per rank."""
    fill: float
    """Tokens over the capacity of all micro-batches."""
    over_cap: int
    """Micro-batches above the token cap that hold more than one sample."""
    rank_imbalance: float
    """Costliest rank over the mean."""
    slot_imbalance: float
    """Sum over slots of the costliest micro-batch, over the mean rank cost."""
    seconds: float
    """Wall time of the method, figures left out."""


def compare_methods(request: ScheduleRequest) -> list[MethodFigures]:
    """Run every reference and this package's settings on all samples of `request` as one step.

    Args:
        request: dynamic packing; its balance, slack, policies and cut into steps are not used.
    """
    figures = [measure_reference(request, number) for number in range(len(REFERENCES))]
    whole = replace(
        request,
        global_batch_size=None,
        splitter="all",
        on_oversized="alone",
        on_misaligned="split_then_filler",
    )
    for balance, slack in OURS:
        plan = plan_schedule(replace(whole, balance=balance, rank_slack=slack))
        name = f"rl-schedule {balance}" + ("" if slack == 0.0 else f", slack {slack}")
        figures.append(measure_plan(name, request, plan))
    return figures


def measure_reference(request: ScheduleRequest, number: int) -> MethodFigures:
    """Run `REFERENCES[number]` and measure it."""
    name, longest_first, differencing = REFERENCES[number]
    lengths, costs = request.padded_lengths, _costs(request)
    started = time.perf_counter()
    order = decreasing_order(lengths) if longest_first else np.arange(lengths.size)
    bin_of = np.empty(lengths.size, dtype=np.int64)
    bin_of[order] = fill_first_fit(lengths[order].tolist(), request.token_cap or 0)
    needed = round_up(int(bin_of.max()) + 1, request.alignment)
    bins = align_bins(bin_of, lengths, needed)
    ranks, slots = request.dp_size, needed // request.dp_size
    if differencing:
        dealt = deal_bins(bins, costs, num_ranks=ranks, num_bins=needed)
        placed = arrange_slots(dealt, costs, num_ranks=ranks, num_slots=slots)
    else:
        placed = deal_in_turn(bins, num_ranks=ranks, num_slots=slots)
    seconds = time.perf_counter() - started
    return _measure(name, request, placed, needed, costs, seconds)


def measure_plan(name: str, request: ScheduleRequest, plan: SchedulePlan) -> MethodFigures:
    """Measure a plan of one step with the cost of `request`."""
    placed, num_bins = np.empty_like(plan.sample_positions), plan.micro_batch_offsets.size - 1
    placed[plan.sample_positions] = plan.placed_rows
    return _measure(name, request, placed, num_bins, _costs(request), plan.stats.wall_seconds)


def _costs(request: ScheduleRequest) -> IntArray:
    lengths = request.padded_lengths
    weights = request.costs_of(np.arange(lengths.size))
    return integer_costs(weights, terms=lengths.size + request.alignment)


def _measure(
    name: str,
    request: ScheduleRequest,
    placed: IntArray,
    num_bins: int,
    costs: IntArray,
    seconds: float,
) -> MethodFigures:
    cap, lengths = request.token_cap or 1, request.padded_lengths
    cost_DM = bin_sums(costs, placed, num_bins).reshape(request.dp_size, -1)
    shared_K = np.bincount(placed, minlength=num_bins) > 1
    return MethodFigures(
        method=name,
        micro_batches=cost_DM.shape[1],
        fill=int(lengths.sum()) / (num_bins * cap),
        over_cap=int(np.count_nonzero(shared_K & (bin_sums(lengths, placed, num_bins) > cap))),
        rank_imbalance=rank_imbalance(cost_DM),
        slot_imbalance=slot_imbalance(cost_DM),
        seconds=seconds,
    )
