"""From request to plan: steps as without sharing, then trees, then one layout.

Invariants: the promises that `check_prefix_plan` lists; a request and its cost model alone
determine the digest.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rl_schedule.arrays import FloatArray, IntArray
from rl_schedule.cost import integer_costs
from rl_schedule.errors import InfeasibleScheduleError, ScheduleError
from rl_schedule.packing import round_up
from rl_schedule.prefix.fragments import SharedStep
from rl_schedule.prefix.plan import PrefixPlan
from rl_schedule.prefix.request import PrefixRequest, check_prefix_request
from rl_schedule.prefix.statistics import PrefixStepStats
from rl_schedule.prefix.step import PlannedTrees, plan_trees
from rl_schedule.steps import Rollouts, cut_steps, group_rollouts

__all__ = ["plan_with_prefixes"]

_log = logging.getLogger("rl_schedule")

_SHOWN = 5
"""Samples named in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """One step on its way into the plan."""

    members: IntArray
    """int64 [N]: rollout positions, ascending."""
    trees: PlannedTrees
    stats: PrefixStepStats


def plan_with_prefixes(request: PrefixRequest) -> PrefixPlan:
    """Plan a rollout batch so that samples in one micro-batch share their prefix.

    Steps are cut exactly as `plan_schedule` cuts them. Inside a step the samples of one prefix are
    kept together as far as the token cap and even ranks allow; a micro-batch holds the tokens of
    its responses and of each of its prefixes once. What is levelled is the work that is really
    done, by `PrefixCost`.

    Example: one rank under 14 tokens, samples of 7, 6 and 5 tokens, the first two with one prompt
    of 4 tokens, the third with another of 2: one micro-batch of 4 + 3 + 2 + 2 + 3 = 14 tokens,
    where `plan_schedule` needs two.

    Raises:
        ScheduleError: something else than a `PrefixRequest`, data that a policy chosen as `"error"`
            refuses, or a cost model that returns something that is no cost.
    """
    check_prefix_request(request)
    schedule = request.schedule
    rollouts = group_rollouts(np.asarray(schedule.rollout_ids))
    kept = _without_oversized(request, rollouts)
    sizes = cut_steps(
        kept,
        np.asarray(schedule.total_lengths),
        global_batch_size=schedule.global_batch_size,
        splitter=schedule.splitter,
        on_trailing=schedule.on_trailing,
        dp_size=schedule.dp_size,
    )
    ends = np.cumsum([0, *sizes]).tolist()
    steps = [
        _plan_step(
            request, number, np.sort(kept.positions[kept.offsets[first] : kept.offsets[last]])
        )
        for number, (first, last) in enumerate(pairwise(ends))
    ]
    return _assemble(request, rollouts, kept.ids[: ends[-1]], steps)


def _without_oversized(request: PrefixRequest, rollouts: Rollouts) -> Rollouts:
    """Refuse samples above the cap, or leave out their rollouts, if the policy says so."""
    schedule, oversized = request.schedule, request.schedule.oversized_samples
    if oversized.size and schedule.on_oversized == "error":
        totals = np.asarray(schedule.total_lengths)
        shown = ", ".join(f"{i} ({totals[i]} tokens)" for i in oversized[:_SHOWN].tolist())
        raise InfeasibleScheduleError(
            f"{oversized.size} samples exceed the cap of {request.token_cap} tokens per micro-batch"
            f" with their prefix: {shown}{', ...' if oversized.size > _SHOWN else ''}; raise"
            ' max_tokens_per_gpu or cp_size, or set on_oversized to "alone" or "drop"'
        )
    if schedule.on_oversized != "drop" or not oversized.size:
        return rollouts
    # reduceat: one "or" for each rollout's run of samples.
    keep = ~np.logical_or.reduceat(np.isin(rollouts.positions, oversized), rollouts.offsets[:-1])
    sizes = np.diff(rollouts.offsets)
    _log.warning(
        "dropping %d of %d rollouts with a sample above %s tokens",
        int((~keep).sum()),
        len(rollouts),
        request.token_cap,
    )
    return Rollouts(
        ids=rollouts.ids[keep],
        offsets=np.concatenate([[0], np.cumsum(sizes[keep])]).astype(np.int64),
        positions=rollouts.positions[np.repeat(keep, sizes)],
    )


def _plan_step(request: PrefixRequest, number: int, members: IntArray) -> _Planned:
    """Place and measure the samples of one step.

    Raises:
        InfeasibleScheduleError: fillers are needed and `on_misaligned` is `"error"`.
    """
    schedule = request.schedule
    ids, prefixes = np.asarray(request.prefix_ids)[members], np.asarray(request.prefix_lengths)
    prefix_lengths, responses = prefixes[members], request.response_lengths[members]
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    # unique sorts by id; prefixes are numbered by first occurrence, whatever their ids are.
    order = np.argsort(first, kind="stable")
    prefix_of = np.argsort(order)[inverse.reshape(-1)]
    first = first[order]
    model = request.balance_model
    # One scale for both, with room for a copy of its prefix beside every sample.
    weights = np.concatenate(
        [model.responses(prefix_lengths, responses), model.prefixes(prefix_lengths)]
    )
    costs = integer_costs(weights, terms=2 * members.size + schedule.alignment)
    step = SharedStep(
        responses=responses,
        costs=costs[: members.size],
        prefix_of=prefix_of,
        prefix_tokens=prefix_lengths[first],
        prefix_costs=costs[members.size :][first],
        # A cap above the tokens of the step means the same and could overflow a product.
        cap=min(request.token_cap, int((prefix_lengths + responses).sum())),
        num_ranks=schedule.dp_size,
        alignment=schedule.alignment,
        may_leave_empty=schedule.on_misaligned != "error",
    )
    trees = plan_trees(step)
    stats = _measure(request, step, trees, members)
    if schedule.on_misaligned == "error" and stats.fillers:
        raise InfeasibleScheduleError(
            f"step {number} has {members.size} samples but needs"
            f" {trees.num_slots * schedule.dp_size} micro-batches (a multiple of"
            f' {schedule.alignment} = ranks times pipeline group) and on_misaligned is "error"; use'
            ' fewer ranks, more samples, or on_misaligned="split_then_filler"'
        )
    return _Planned(members=members, trees=trees, stats=stats)


def _measure(
    request: PrefixRequest, step: SharedStep, trees: PlannedTrees, members: IntArray
) -> PrefixStepStats:
    """Compute the figures of a step, in the unit of the request's cost model."""
    ranks, slots, placed = step.num_ranks, trees.num_slots, trees.fragments
    prefixes = np.asarray(request.prefix_lengths)[members]
    model = request.cost_model
    response_costs = model.responses(prefixes, step.responses).astype(np.float64)
    prefix_costs = model.prefixes(step.prefix_tokens).astype(np.float64)
    with np.errstate(over="ignore"):
        tree_costs: FloatArray = prefix_costs[placed.prefixes] + [
            float(response_costs[samples].sum()) for samples in placed.members
        ]
        total = float(tree_costs.sum())
        least_work = float(response_costs.sum() + (prefix_costs * step.fewest_copies()).sum())
    if not (math.isfinite(total) and math.isfinite(least_work)):
        raise ScheduleError(
            f"the costs of a step of {members.size} samples add up to more than float64 holds;"
            " give costs in a larger unit, only ratios matter"
        )
    cost_K = np.bincount(trees.bin_of, weights=tree_costs, minlength=ranks * slots)
    cost_DM = cost_K.reshape(ranks, slots)
    mean = float(cost_DM.sum()) / ranks
    slowest = float(cost_DM.sum(axis=1).max())
    costliest = float((response_costs + prefix_costs[step.prefix_of]).max())
    tokens = int(placed.tokens(step).sum())
    aligned = round_up(step.least_micro_batches(), step.alignment)
    return PrefixStepStats(
        num_rollouts=np.unique(np.asarray(request.schedule.rollout_ids)[members]).size,
        num_samples=members.size,
        num_tokens=tokens,
        num_tokens_unshared=int(step.totals.sum()),
        prefixes=step.prefix_tokens.size,
        prefix_copies=len(placed.prefixes),
        micro_batches=slots,
        micro_batch_bound=aligned // ranks,
        fillers=int(np.count_nonzero(np.bincount(trees.bin_of, minlength=ranks * slots) == 0)),
        fill=tokens / (ranks * slots * request.token_cap),
        rank_imbalance=slowest / mean if mean else 1.0,
        slot_imbalance=float(cost_DM.max(axis=0).sum()) / mean if mean else 1.0,
        slowest_rank_cost=slowest,
        slowest_rank_bound=min(slowest, max(least_work / ranks, costliest)),
        path=trees.path,
    )


def _assemble(
    request: PrefixRequest, rollouts: Rollouts, trained: IntArray, steps: Sequence[_Planned]
) -> PrefixPlan:
    """Lay the steps out rank by rank and list what does not run."""
    schedule = request.schedule
    counts = tuple(step.trees.num_slots for step in steps)
    starts = np.cumsum([0, *counts]).tolist()
    # Trees of all steps as (row, rollout positions); a row counts a rank's micro-batches of all
    # steps. The first position orders the trees of a micro-batch.
    trees = sorted(
        (rank * starts[-1] + start + slot, step.members[samples].tolist())
        for step, start in zip(steps, starts, strict=False)
        for samples, rank, slot in zip(
            step.trees.fragments.members,
            *map(np.ndarray.tolist, divmod(step.trees.bin_of, step.trees.num_slots)),
            strict=True,
        )
    )
    positions = np.asarray([i for _, samples in trees for i in samples], dtype=np.int64)
    first = np.asarray([samples[0] for _, samples in trees], dtype=np.int64)
    sizes_K = np.bincount(
        np.asarray([row for row, _ in trees], dtype=np.int64),
        minlength=schedule.dp_size * starts[-1],
    )
    fillers = np.flatnonzero(sizes_K == 0).tolist()
    return PrefixPlan(
        dp_size=schedule.dp_size,
        sample_positions=positions,
        response_lengths=request.response_lengths[positions],
        tree_sample_offsets=np.cumsum([0, *(len(samples) for _, samples in trees)]),
        tree_prefix_ids=np.asarray(request.prefix_ids)[first],
        tree_prefix_lengths=np.asarray(request.prefix_lengths)[first],
        micro_batch_offsets=np.concatenate([[0], np.cumsum(sizes_K)]),
        num_microbatches=counts,
        global_batch_sizes=tuple(step.stats.num_rollouts for step in steps),
        dropped_samples=tuple(np.setdiff1d(rollouts.positions, positions).tolist()),
        dropped_rollouts=tuple(rollouts.ids[~np.isin(rollouts.ids, trained)].tolist()),
        oversized_samples=tuple(schedule.oversized_samples.tolist()),
        filler_micro_batches=tuple(divmod(row, starts[-1]) for row in fillers),
        stats=tuple(step.stats for step in steps),
    )
