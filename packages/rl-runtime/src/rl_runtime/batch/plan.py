"""Plan one batch and cut its columns into one part per data-parallel rank.

The plan is made once, here, so that trainer ranks can never disagree about it.

Invariants: every kept sample is in exactly one part; a rank's columns are in the order of its
partition; loss denominators are taken over the whole step, before packing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rl_dump import RaggedArray
from rl_metrics import Aggregation, count_step_units, loss_denominators
from rl_runtime.batch.rank_batch import Column, RankBatch, take_columns
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import BatchMismatchError
from rl_schedule import (
    InfeasibleScheduleError,
    SchedulePlan,
    ScheduleRequest,
    check_plan,
    plan_schedule,
)

__all__ = ["Assignment", "assign_batch"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A planned batch."""

    plan: SchedulePlan
    """The whole plan."""
    columns: Mapping[str, Column]
    """All samples, with `loss_denominators`, `step` (-1 = dropped) beside the batch's columns."""
    rank_batches: tuple[RankBatch, ...]
    """One per data-parallel rank."""


def assign_batch(columns: Mapping[str, Column], recipe: Recipe, *, batch_id: int) -> Assignment:
    """Plan a batch for the recipe's mesh and cut it.

    Args:
        columns: `rollout-batch.v1` columns over N samples.
        recipe: mesh, limits and loss aggregation.
        batch_id: loop counter.

    Raises:
        ScheduleError: the chosen policies do not allow this batch.
        BatchMismatchError: the plan breaks one of its promises; the message lists them.
    """
    request, plan = _planned(columns, recipe, batch_id)
    problems = check_plan(plan, request)
    if problems:
        raise BatchMismatchError(
            f"batch {batch_id}: the plan breaks its promises: "
            + "; ".join(str(problem) for problem in problems)
        )
    step = _step_of_each_sample(plan, num_samples=len(columns["total_lengths"]))
    aggregation = recipe.algorithm.loss_aggregation
    planned = {
        **columns,
        "step": step,
        "loss_denominators": _denominators(columns, step, aggregation),
    }
    units = _step_units(columns, step, aggregation, steps=len(plan.num_microbatches))
    rank_batches = tuple(
        RankBatch(
            batch_id=batch_id,
            plan=view,
            columns=take_columns(planned, view.partition),
            step_units=units,
        )
        for view in (plan.rank_view(rank) for rank in range(recipe.parallel.data))
    )
    return Assignment(plan=plan, columns=planned, rank_batches=rank_batches)


def _planned(
    columns: Mapping[str, Column], recipe: Recipe, batch_id: int
) -> tuple[ScheduleRequest, SchedulePlan]:
    request = _request(columns, recipe)
    try:
        return request, plan_schedule(request)
    except InfeasibleScheduleError as error:
        if request.on_trailing != "drop":
            raise
        # Rollouts were lost on the way; what is left is a smaller step rather than the end of the
        # run.
        _log.warning(
            "batch %d does not fill one step, and is trained as a smaller one: %s", batch_id, error
        )
        smaller = replace(request, on_trailing="partial_step")
        return smaller, plan_schedule(smaller)


def _request(columns: Mapping[str, Column], recipe: Recipe) -> ScheduleRequest:
    context = recipe.parallel.context
    return ScheduleRequest(
        total_lengths=_integers(columns, "total_lengths"),
        rollout_ids=_integers(columns, "rollout_ids"),
        global_batch_size=recipe.train.global_batch_size,
        dp_size=recipe.parallel.data,
        cp_size=context,
        max_tokens_per_gpu=recipe.train.max_tokens_per_gpu,
        balance=recipe.train.balance,
        on_oversized=recipe.train.on_oversized,
        on_trailing=recipe.train.on_trailing,
        pad_to_multiple=2 * context if context > 1 else 1,
    )


def _step_of_each_sample(plan: SchedulePlan, *, num_samples: int) -> npt.NDArray[np.int64]:
    step = np.full(num_samples, -1, np.int64)
    step_of_micro_batch = np.repeat(np.arange(len(plan.num_microbatches)), plan.num_microbatches)
    for partition, micro_batches in zip(plan.partitions, plan.micro_batch_indices, strict=True):
        for index, local in zip(step_of_micro_batch, micro_batches, strict=True):
            step[partition[local]] = index
    return step


def _denominators(
    columns: Mapping[str, Column], step: npt.NDArray[np.int64], aggregation: Aggregation
) -> npt.NDArray[np.float32]:
    # A prompt group may be spread over steps, and then counts in each of them by its part there.
    pairs = np.stack([step, _integers(columns, "group_ids")], axis=1)
    groups_of_steps = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    denominators = loss_denominators(
        aggregation,
        list(_ragged(columns, "loss_masks")),
        rollout_ids=_integers(columns, "rollout_ids").tolist(),
        group_ids=groups_of_steps.tolist(),
    )
    return denominators.astype(np.float32)


def _step_units(
    columns: Mapping[str, Column],
    step: npt.NDArray[np.int64],
    aggregation: Aggregation,
    *,
    steps: int,
) -> npt.NDArray[np.float64]:
    units = np.empty(steps, np.float64)
    for index in range(steps):
        part = take_columns(columns, np.flatnonzero(step == index))
        units[index] = count_step_units(
            aggregation,
            list(_ragged(part, "loss_masks")),
            rollout_ids=_integers(part, "rollout_ids").tolist(),
            group_ids=_integers(part, "group_ids").tolist(),
        )
    return units


def _integers(columns: Mapping[str, Column], name: str) -> npt.NDArray[np.int64]:
    column = columns[name]
    assert isinstance(column, np.ndarray), name
    return column.astype(np.int64, copy=False)


def _ragged(columns: Mapping[str, Column], name: str) -> RaggedArray:
    column = columns[name]
    assert isinstance(column, RaggedArray), name
    return column
