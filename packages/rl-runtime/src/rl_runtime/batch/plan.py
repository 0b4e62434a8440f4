"""Plan one batch and cut its columns into one `RankBatch` for each data-parallel rank.

The plan is made once, here, so that trainer ranks can never disagree about it.

Invariants: every sample that is not dropped is in exactly one rank batch; a rank's columns are in
the order of its partition; loss denominators are taken over the whole step, before packing.

Axes: N samples of the batch, S steps, R response tokens of one sample.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_dump import RaggedArray
from rl_metrics import count_step_units, loss_denominators
from rl_runtime.batch.columns import ABSENT_INDEX
from rl_runtime.batch.rank_batch import Column, RankBatch, take_columns
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import BatchMismatchError
from rl_schedule import (
    CostModel,
    InfeasibleScheduleError,
    SchedulePlan,
    ScheduleRequest,
    check_plan,
    plan_schedule,
)

__all__ = ["PlannedBatch", "plan_batch"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A batch with its plan.

    Example: five samples of four rollouts, two rollouts a step, two ranks: `columns["step"]` is
    [0, 0, 0, 1, 1], and `rank_batches` has two entries with five samples together.
    """

    plan: SchedulePlan
    """The whole plan."""
    columns: Mapping[str, Column]
    """All samples: the batch's columns, `loss_denominators`, and `step` (-1 = dropped)."""
    rank_batches: tuple[RankBatch, ...]
    """One per data-parallel rank."""


def plan_batch(
    columns: Mapping[str, Column], recipe: Recipe, *, batch_id: int, cost: CostModel
) -> PlannedBatch:
    """Plan a batch for the recipe's mesh and cut it.

    Args:
        columns: columns over N samples.
        recipe: mesh, limits and loss aggregation.
        batch_id: loop counter.
        cost: work of one sample by its length in tokens, in the FLOPs of the model that is
            trained: what `train.balance = "flops"` levels.

    Raises:
        ScheduleError: the chosen policies do not allow this batch.
        BatchMismatchError: the plan breaks one of its promises; the message lists them.
    """
    request, plan = _make_plan(_request(columns, recipe, cost), batch_id)
    problems = check_plan(plan, request)
    if problems:
        raise BatchMismatchError(
            f"batch {batch_id}: the plan breaks its promises: "
            + "; ".join(str(problem) for problem in problems)
        )
    step_N = plan.placement().step
    denominators_N, step_units_S = _loss_weights(
        columns, step_N, recipe, num_steps=len(plan.num_microbatches)
    )
    planned = {**columns, "step": step_N, "loss_denominators": denominators_N}
    views = (plan.rank_view(rank) for rank in range(recipe.parallel.data))
    rank_batches = tuple(
        RankBatch(
            batch_id=batch_id,
            plan=view,
            columns=take_columns(planned, view.partition),
            step_units=step_units_S,
            whole_batch=_whole_batch(planned, request, plan) if view.rank == 0 else None,
        )
        for view in views
    )
    return PlannedBatch(plan=plan, columns=planned, rank_batches=rank_batches)


def _request(columns: Mapping[str, Column], recipe: Recipe, cost: CostModel) -> ScheduleRequest:
    context = recipe.parallel.context
    return ScheduleRequest(
        total_lengths=_integers(columns, "total_lengths"),
        rollout_ids=_integers(columns, "rollout_ids"),
        global_batch_size=recipe.train.global_batch_size,
        dp_size=recipe.parallel.data,
        cp_size=context,
        max_tokens_per_gpu=recipe.train.max_tokens_per_gpu,
        balance=recipe.train.balance,
        extra_micro_batches=recipe.train.extra_micro_batches,
        cost=cost,
        on_oversized=recipe.train.on_oversized,
        on_trailing=recipe.train.on_trailing,
        # The zigzag layout gives each context rank two equal chunks, so every sequence is padded
        # to a multiple of 2 * context; a plan that counts fewer tokens would burst the cap.
        pad_to_multiple=2 * context if context > 1 else 1,
    )


def _make_plan(request: ScheduleRequest, batch_id: int) -> tuple[ScheduleRequest, SchedulePlan]:
    """Plan, with one smaller step where rollouts that were lost leave less than a whole one."""
    try:
        return request, plan_schedule(request)
    except InfeasibleScheduleError as error:
        if request.on_trailing != "drop":
            raise
        _log.warning(
            "batch %d does not fill one step, and is trained as a smaller one: %s", batch_id, error
        )
        smaller = replace(request, on_trailing="partial_step")
        return smaller, plan_schedule(smaller)


def _whole_batch(
    columns: Mapping[str, Column], request: ScheduleRequest, plan: SchedulePlan
) -> dict[str, Any]:
    """Return what a train dump says of all samples of the batch, dropped ones among them."""
    indices, rollout_ids = _integers(columns, "sample_index"), _integers(columns, "rollout_ids")
    cap = f"the {request.token_cap} tokens that a micro-batch may hold"
    too_long = set(plan.oversized_samples if request.on_oversized == "drop" else ())
    # A rollout is dropped whole: one sample that is too long takes its siblings with it.
    shortened = {int(rollout_ids[position]) for position in too_long}

    def reason(position: int) -> str:
        if position in too_long:
            return f"longer than {cap}"
        if int(rollout_ids[position]) in shortened:
            return f"a sample of its rollout is longer than {cap}"
        return f"its rollout does not fill a step of {request.global_batch_size} rollouts"

    dropped = [
        {
            "rollout_position": position,
            "sample_index": None if indices[position] == ABSENT_INDEX else int(indices[position]),
            "rollout_id": int(rollout_ids[position]),
            "reason": reason(position),
        }
        for position in map(int, plan.dropped_samples)
    ]
    raw_reward = np.asarray(columns["raw_reward"]).tolist()
    return {"schedule": plan.to_document(), "raw_reward": raw_reward, "dropped": dropped}


def _loss_weights(
    columns: Mapping[str, Column], step_N: npt.NDArray[np.int64], recipe: Recipe, *, num_steps: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Return the loss denominators, float32 [N], and the units of each step, float64 [S]."""
    aggregation = recipe.algorithm.loss_aggregation
    masks = columns["loss_masks"]
    assert isinstance(masks, RaggedArray)
    rollout_ids_N, group_ids_N = _integers(columns, "rollout_ids"), _integers(columns, "group_ids")
    # A prompt group may be spread over steps, and then counts in each of them by its share there:
    # the pair (step, group) is the group. Dropped samples keep step -1 and so stay apart.
    pairs_N2 = np.stack([step_N, group_ids_N], axis=1)
    group_of_step_N = np.unique(pairs_N2, axis=0, return_inverse=True)[1].reshape(-1)
    denominators_N = loss_denominators(
        aggregation,
        list(masks),
        rollout_ids=rollout_ids_N.tolist(),
        group_ids=group_of_step_N.tolist(),
    )
    step_units_S = np.empty(num_steps, np.float64)
    for step in range(num_steps):
        rows = np.flatnonzero(step_N == step)
        step_units_S[step] = count_step_units(
            aggregation,
            list(masks.take(rows)),
            rollout_ids=rollout_ids_N[rows].tolist(),
            group_ids=group_ids_N[rows].tolist(),
        )
    return denominators_N.astype(np.float32), step_units_S


def _integers(columns: Mapping[str, Column], name: str) -> npt.NDArray[np.int64]:
    column = columns[name]
    assert isinstance(column, np.ndarray), name
    return column.astype(np.int64, copy=False)
