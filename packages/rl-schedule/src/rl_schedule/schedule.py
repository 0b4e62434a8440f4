"""From request to plan: the one entry point; top of the algorithm layer.

Decides nothing itself: drops what policies drop, cuts steps, lets each step be packed by the mode
asked for, and writes the plan. Invariants: P1-P10 of `check_plan`; a request and its cost model
alone determine the digest.
"""

import logging
import time
from collections.abc import Sequence

import numpy as np

from rl_schedule.arrays import IntArray, Integers
from rl_schedule.cost import CostModel
from rl_schedule.errors import InfeasibleScheduleError
from rl_schedule.plan import SchedulePlan
from rl_schedule.planned_step import PlannedStep, plan_step
from rl_schedule.request import (
    Balance,
    OnMisaligned,
    OnOversized,
    OnTrailing,
    RankSlack,
    ScheduleRequest,
)
from rl_schedule.statistics import summarize
from rl_schedule.steps import Rollouts, StepSplitter, cut_steps, group_rollouts

__all__ = ["build_dp_schedule", "plan_schedule"]

_log = logging.getLogger("rl_schedule")


def build_dp_schedule(
    *,
    total_lengths: Integers,
    rollout_ids: Integers,
    global_batch_size: int | Sequence[int] | None,
    dp_size: int,
    cp_size: int = 1,
    vpp_size: int = 1,
    microbatch_group_size_per_vp_stage: int = 1,
    max_tokens_per_gpu: int | None = None,
    micro_batch_size: int | None = None,
    balance: Balance = "flops",
    rank_slack: RankSlack = 0.0,
    cost: CostModel | None = None,
    splitter: str | StepSplitter = "fixed",
    on_oversized: OnOversized = "alone",
    on_misaligned: OnMisaligned = "split_then_filler",
    on_trailing: OnTrailing = "drop",
    pad_to_multiple: int = 1,
) -> SchedulePlan:
    """Decide steps, micro-batches and ranks of one rollout batch.

    Args:
        total_lengths: prompt + response tokens of each sample [n], index = rollout position.
        rollout_ids: the execution each sample came from [n]; samples of one id stay in one step.
        global_batch_size: rollouts per step (a list of them under `splitter="sizes"`; not read
            under `"all"`).
        dp_size: data-parallel ranks, without context parallelism.
        cp_size: context-parallel ranks; a micro-batch holds up to `max_tokens_per_gpu * cp_size`
            tokens.
        vpp_size: virtual pipeline chunks; above 1 the count per rank is a multiple of the next
            argument.
        microbatch_group_size_per_vp_stage: that multiple.
        max_tokens_per_gpu: dynamic packing; exactly one of this and the next.
        micro_batch_size: static packing, consecutive samples per micro-batch.
        balance: `"flops"`, `"tokens"` or the plain reference `"none"`.
        rank_slack: how far a rank may end above the mean to save slot time, or `"auto"`.
        cost: cost model by length; None = `QuadraticCost()`.
        splitter: `"fixed"`, `"sizes"`, `"all"`, a `StepSplitter` or its import path.
        on_oversized: `"alone"`, `"error"` or `"drop"` (the whole rollout).
        on_misaligned: `"split_then_filler"` or `"error"` (when fillers would be needed).
        on_trailing: `"drop"`, `"partial_step"` or `"error"`.
        pad_to_multiple: each sequence occupies its length rounded up to this.

    Returns:
        The plan; equal input gives an equal digest. Example: lengths 7, 3, 5 of rollouts 0, 0, 1 on
        one rank under 8 tokens give two micro-batches, {7} and {3, 5}.

    Raises:
        ScheduleError: malformed input, or data that a policy chosen as `"error"` refuses.
    """
    return plan_schedule(
        ScheduleRequest(
            total_lengths=total_lengths,
            rollout_ids=rollout_ids,
            global_batch_size=global_batch_size,
            dp_size=dp_size,
            cp_size=cp_size,
            vpp_size=vpp_size,
            microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage,
            max_tokens_per_gpu=max_tokens_per_gpu,
            micro_batch_size=micro_batch_size,
            balance=balance,
            rank_slack=rank_slack,
            cost=cost,
            splitter=splitter,
            on_oversized=on_oversized,
            on_misaligned=on_misaligned,
            on_trailing=on_trailing,
            pad_to_multiple=pad_to_multiple,
        )
    )


def plan_schedule(request: ScheduleRequest) -> SchedulePlan:
    """Plan a validated request; see `build_dp_schedule` for what it decides and raises."""
    started = time.perf_counter()
    lengths = request.padded_lengths
    rollouts = group_rollouts(np.asarray(request.rollout_ids))
    oversized = _oversized(request, lengths)
    kept = _without_oversized(request, rollouts, lengths, oversized)
    cut = cut_steps(
        kept,
        lengths,
        global_batch_size=request.global_batch_size,
        splitter=request.splitter,
        on_trailing=request.on_trailing,
        dp_size=request.dp_size,
    )
    steps = [
        plan_step(
            request,
            number,
            kept.positions[kept.offsets[first] : kept.offsets[last]],
            lengths,
            num_rollouts=int(last - first),
        )
        for number, (first, last) in enumerate(zip(cut.offsets[:-1], cut.offsets[1:], strict=True))
    ]
    return _assemble(request, rollouts, kept.ids[: cut.offsets[-1]], oversized, steps, started)


def _oversized(request: ScheduleRequest, lengths: IntArray) -> IntArray:
    """Return the positions longer than the cap; none under static packing."""
    cap = request.token_cap
    oversized = (
        np.empty(0, dtype=np.int64)
        if cap is None
        else np.flatnonzero(lengths > cap).astype(np.int64)
    )
    if oversized.size and request.on_oversized == "error":
        shown = ", ".join(f"{int(i)} ({int(lengths[i])} tokens)" for i in oversized[:5])
        raise InfeasibleScheduleError(
            f"{oversized.size} samples exceed the cap of {cap} tokens per micro-batch:"
            f" {shown}{', ...' if oversized.size > 5 else ''}; raise max_tokens_per_gpu or cp_size,"
            ' or set on_oversized to "alone" or "drop"'
        )
    return oversized


def _without_oversized(
    request: ScheduleRequest, rollouts: Rollouts, lengths: IntArray, oversized: IntArray
) -> Rollouts:
    """Leave out the rollouts with an oversized sample if the policy drops them."""
    if request.on_oversized != "drop" or not oversized.size:
        return rollouts
    is_oversized = np.zeros(lengths.size, dtype=bool)
    is_oversized[oversized] = True
    keep = ~np.logical_or.reduceat(is_oversized[rollouts.positions], rollouts.offsets[:-1])
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


def _assemble(
    request: ScheduleRequest,
    rollouts: Rollouts,
    trained: IntArray,
    oversized: IntArray,
    steps: list[PlannedStep],
    started: float,
) -> SchedulePlan:
    """Lay the steps out rank by rank and list what does not run."""
    offsets, positions = _flatten(steps, request.dp_size)
    counts = tuple(step.assignment.num_slots for step in steps)
    ran = np.zeros(rollouts.positions.size, dtype=bool)
    ran[positions] = True
    fillers = np.flatnonzero(np.diff(offsets) == 0)
    return SchedulePlan(
        dp_size=request.dp_size,
        sample_positions=positions,
        micro_batch_offsets=offsets,
        num_microbatches=counts,
        global_batch_sizes=tuple(step.stats.num_rollouts for step in steps),
        dropped_samples=tuple(np.flatnonzero(~ran).tolist()),
        dropped_rollouts=tuple(rollouts.ids[~np.isin(rollouts.ids, trained)].tolist()),
        oversized_samples=tuple(oversized.tolist()),
        filler_micro_batches=tuple(divmod(row, sum(counts)) for row in fillers.tolist()),
        settings=request.settings(),
        stats=summarize(
            [step.stats for step in steps],
            token_cap=request.token_cap,
            dp_size=request.dp_size,
            wall_seconds=time.perf_counter() - started,
        ),
    )


def _flatten(steps: list[PlannedStep], dp_size: int) -> tuple[IntArray, IntArray]:
    """Return micro-batch offsets [D * M + 1] and sample positions, rank by rank over all steps."""
    before = np.cumsum([0, *(step.assignment.num_slots for step in steps)])
    per_rank = int(before[-1])
    rows = [
        (bins // step.assignment.num_slots) * per_rank + start + bins % step.assignment.num_slots
        for step, start in zip(steps, before[:-1], strict=True)
        for bins in [step.assignment.bin_of]
    ]
    row = np.concatenate([np.empty(0, dtype=np.int64), *rows])
    positions = np.concatenate([np.empty(0, dtype=np.int64), *(step.members for step in steps)])
    offsets = np.zeros(dp_size * per_rank + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=dp_size * per_rank), out=offsets[1:])
    return offsets, positions[np.argsort(row, kind="stable")]
