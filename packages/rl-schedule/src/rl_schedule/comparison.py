"""All methods on one step, side by side; layer above `references` and `schedule`.

Decides which figures a comparison has. Invariant: every method is measured with the same cost on
the same padded lengths.
"""

import time
from dataclasses import dataclass

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.cost import evaluate_cost, integer_costs
from rl_schedule.dealing import bin_sums
from rl_schedule.plan import SchedulePlan
from rl_schedule.references import REFERENCES, run_reference
from rl_schedule.request import Balance, RankSlack, ScheduleRequest
from rl_schedule.schedule import plan_schedule
from rl_schedule.statistics import rank_imbalance, slot_imbalance

__all__ = [
    "OURS",
    "MethodFigures",
    "compare_methods",
    "measure_ours",
    "measure_plan",
    "measure_reference",
]

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
        request: dynamic packing; its balance, slack, splitter and cut into steps are not used.
    """
    references = [measure_reference(request, number) for number in range(len(REFERENCES))]
    return references + [measure_ours(request, balance, slack) for balance, slack in OURS]


def measure_reference(request: ScheduleRequest, number: int) -> MethodFigures:
    """Run `REFERENCES[number]` and measure it."""
    lengths = request.padded_lengths
    costs = _costs(request)
    started = time.perf_counter()
    placed, num_bins = run_reference(
        REFERENCES[number],
        lengths,
        costs,
        cap=request.token_cap or 0,
        num_ranks=request.dp_size,
        alignment=request.alignment,
    )
    seconds = time.perf_counter() - started
    return _measure(REFERENCES[number].name, request, placed, num_bins, costs, seconds)


def measure_ours(request: ScheduleRequest, balance: Balance, slack: RankSlack) -> MethodFigures:
    """Plan all samples as one step with the given settings and measure the plan."""
    plan = plan_schedule(_one_step(request, balance, slack))
    name = f"rl-schedule {balance}" + ("" if slack == 0.0 else f", slack {slack}")
    return measure_plan(name, request, plan)


def measure_plan(name: str, request: ScheduleRequest, plan: SchedulePlan) -> MethodFigures:
    """Measure a plan of one step with the cost of `request`."""
    sizes = np.diff(plan.micro_batch_offsets)
    placed = np.empty(plan.sample_positions.size, dtype=np.int64)
    placed[plan.sample_positions] = np.repeat(np.arange(sizes.size), sizes)
    return _measure(name, request, placed, sizes.size, _costs(request), plan.stats.wall_seconds)


def _one_step(request: ScheduleRequest, balance: Balance, slack: RankSlack) -> ScheduleRequest:
    return ScheduleRequest(
        total_lengths=request.total_lengths,
        rollout_ids=request.rollout_ids,
        global_batch_size=None,
        splitter="all",
        dp_size=request.dp_size,
        cp_size=request.cp_size,
        vpp_size=request.vpp_size,
        microbatch_group_size_per_vp_stage=request.microbatch_group_size_per_vp_stage,
        max_tokens_per_gpu=request.max_tokens_per_gpu,
        balance=balance,
        rank_slack=slack,
        cost=request.cost_model,
        pad_to_multiple=request.pad_to_multiple,
    )


def _costs(request: ScheduleRequest) -> IntArray:
    lengths = request.padded_lengths
    return integer_costs(
        evaluate_cost(request.cost_model, lengths), terms=lengths.size + request.alignment
    )


def _measure(
    name: str,
    request: ScheduleRequest,
    placed: IntArray,
    num_bins: int,
    costs: IntArray,
    seconds: float,
) -> MethodFigures:
    cap, lengths = request.token_cap or 1, request.padded_lengths
    bin_costs = bin_sums(costs, placed, num_bins).reshape(request.dp_size, -1)
    tokens = bin_sums(lengths, placed, num_bins)
    return MethodFigures(
        method=name,
        micro_batches=bin_costs.shape[1],
        fill=int(lengths.sum()) / (num_bins * cap),
        over_cap=int(
            np.count_nonzero((tokens > cap) & (np.bincount(placed, minlength=num_bins) > 1))
        ),
        rank_imbalance=rank_imbalance(bin_costs),
        slot_imbalance=slot_imbalance(bin_costs),
        seconds=seconds,
    )
