"""From request to plan: the one entry point.

It drops what policies drop, cuts steps, lets each step be packed by the mode asked for, and lays
the plan out.

Invariants: P1-P13 of `check_plan`; a request and its cost model alone determine the digest.
"""

import inspect
import logging
import time
from collections.abc import Callable
from itertools import pairwise
from typing import ParamSpec

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.errors import InfeasibleScheduleError
from rl_schedule.limited_step import plan_limited_step
from rl_schedule.plan import SchedulePlan
from rl_schedule.planned_step import PlannedStep, plan_step
from rl_schedule.request import ScheduleRequest
from rl_schedule.statistics import summarize
from rl_schedule.steps import Rollouts, cut_steps, group_rollouts

__all__ = ["build_dp_schedule", "plan_schedule"]

_log = logging.getLogger("rl_schedule")


_Settings = ParamSpec("_Settings")


def _with_parameters_of(
    record: Callable[_Settings, ScheduleRequest],
) -> Callable[[Callable[..., SchedulePlan]], Callable[_Settings, SchedulePlan]]:
    """Give a function the parameters of a record, for type checkers and for `inspect`."""

    def give(function: Callable[..., SchedulePlan]) -> Callable[_Settings, SchedulePlan]:
        signature = inspect.signature(record).replace(return_annotation=SchedulePlan)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return give


@_with_parameters_of(ScheduleRequest)
def build_dp_schedule(**settings: object) -> SchedulePlan:
    """Decide steps, micro-batches and ranks of one rollout batch.

    Args:
        **settings: the fields of `ScheduleRequest`, which documents each of them. Needed are
            `total_lengths` and `rollout_ids` (one entry per sample), `global_batch_size` (rollouts
            per step), `dp_size` (data-parallel ranks), and one of `max_tokens_per_gpu` (dynamic
            packing under a cap of that times `cp_size`) and `micro_batch_size` (static packing).

    Returns:
        The plan; equal input gives an equal digest. Example: lengths 7, 3, 5 of rollouts 0, 0, 1 on
        one rank under 8 tokens give two micro-batches, {7} and {3, 5}.

    Raises:
        ScheduleError: malformed input, or data that a policy chosen as `"error"` refuses.
        TypeError: a setting is missing or unknown; names all of them.
    """
    known = inspect.signature(ScheduleRequest).parameters
    missing = [n for n, p in known.items() if p.default is p.empty and n not in settings]
    unknown = [name for name in settings if name not in known]
    if missing or unknown:
        told = [f"missing {', '.join(missing)}"] * bool(missing)
        told += [f"unknown {', '.join(unknown)}"] * bool(unknown)
        raise TypeError(f"build_dp_schedule: {'; '.join(told)}; settings are {', '.join(known)}")
    return plan_schedule(ScheduleRequest(**settings))  # type: ignore[arg-type]


def plan_schedule(request: ScheduleRequest) -> SchedulePlan:
    """Plan a validated request; see `build_dp_schedule` for what it decides and raises."""
    started = time.perf_counter()
    lengths = request.padded_lengths
    rollouts = group_rollouts(np.asarray(request.rollout_ids))
    oversized = request.oversized_samples
    kept = _without_oversized(request, rollouts, oversized)
    sizes = cut_steps(
        kept,
        lengths,
        global_batch_size=request.global_batch_size,
        splitter=request.splitter,
        on_trailing=request.on_trailing,
        dp_size=request.dp_size,
        dropped=_why_dropped(request, len(rollouts) - len(kept), oversized),
    )
    ends = np.cumsum([0, *sizes]).tolist()
    plan_one = plan_limited_step if request.has_limits else plan_step
    steps = [
        plan_one(
            request,
            number,
            kept.positions[kept.offsets[first] : kept.offsets[last]],
            lengths,
            num_rollouts=last - first,
        )
        for number, (first, last) in enumerate(pairwise(ends))
    ]
    return _assemble(request, rollouts, kept.ids[: ends[-1]], oversized, steps, started)


def _without_oversized(
    request: ScheduleRequest, rollouts: Rollouts, oversized: IntArray
) -> Rollouts:
    """Refuse oversized samples, or leave out their rollouts, if the policy says so."""
    cap = request.token_cap
    if oversized.size and request.on_oversized == "error":
        raise InfeasibleScheduleError(
            f"{_name_oversized(request, oversized)}; raise max_tokens_per_gpu or cp_size,"
            ' or set on_oversized to "alone" or "drop"'
        )
    if request.on_oversized != "drop" or not oversized.size:
        return rollouts
    # reduceat: one "or" for each rollout's run of samples.
    is_oversized = np.isin(rollouts.positions, oversized)
    keep = ~np.logical_or.reduceat(is_oversized, rollouts.offsets[:-1])
    sizes = np.diff(rollouts.offsets)
    _log.warning(
        "dropping %d of %d rollouts with a sample above %s tokens",
        int((~keep).sum()),
        len(rollouts),
        cap,
    )
    return Rollouts(
        ids=rollouts.ids[keep],
        offsets=np.concatenate([[0], np.cumsum(sizes[keep])]).astype(np.int64),
        positions=rollouts.positions[np.repeat(keep, sizes)],
    )


def _name_oversized(request: ScheduleRequest, oversized: IntArray) -> str:
    """Say how many samples exceed which cap, and which, with their tokens."""
    lengths = request.padded_lengths
    shown = ", ".join(f"{int(i)} ({int(lengths[i])} tokens)" for i in oversized[:5])
    return (
        f"{oversized.size} samples exceed the cap of {request.token_cap} tokens per micro-batch:"
        f" {shown}{', ...' if oversized.size > 5 else ''}"
    )


def _why_dropped(request: ScheduleRequest, num_dropped: int, oversized: IntArray) -> str:
    """Say that rollouts are missing because of oversized samples; nothing if none are."""
    if not num_dropped:
        return ""
    return (
        f'{num_dropped} rollouts were dropped before (on_oversized is "drop"):'
        f" {_name_oversized(request, oversized)}; raise max_tokens_per_gpu or cp_size, or set"
        ' on_oversized="alone"'
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
    dropped = np.setdiff1d(rollouts.positions, positions)
    fillers = np.flatnonzero(np.diff(offsets) == 0)
    return SchedulePlan(
        dp_size=request.dp_size,
        sample_positions=positions,
        micro_batch_offsets=offsets,
        num_microbatches=counts,
        global_batch_sizes=tuple(step.stats.num_rollouts for step in steps),
        dropped_samples=tuple(dropped.tolist()),
        dropped_rollouts=tuple(rollouts.ids[~np.isin(rollouts.ids, trained)].tolist()),
        oversized_samples=tuple(oversized.tolist()),
        filler_micro_batches=tuple(divmod(row, sum(counts)) for row in fillers.tolist()),
        rollout_names=tuple(request.rollout_names),
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
    ends = np.cumsum([0, *(step.assignment.num_slots for step in steps)]).tolist()
    # Bins count inside a step; rows count a rank's micro-batches of all steps, M of them.
    rows, positions = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for step, start in zip(steps, ends, strict=False):
        rank, slot = divmod(step.assignment.bin_of, step.assignment.num_slots)
        rows.append(rank * ends[-1] + start + slot)
        positions.append(step.members)
    row = np.concatenate(rows)
    offsets = np.cumsum([0, *np.bincount(row, minlength=dp_size * ends[-1])], dtype=np.int64)
    # Stable, so that the samples of a micro-batch stay in rollout order.
    return offsets, np.concatenate(positions)[np.argsort(row, kind="stable")]
