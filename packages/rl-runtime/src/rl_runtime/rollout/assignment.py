"""Plan one batch and cut its columns into one part per data-parallel rank. Layer: rollout.

The plan is made once, here, so that trainer ranks can never disagree about it.

Invariants: every kept sample is in exactly one part; a rank's columns are in the order of its partition; loss denominators are taken over
the whole step, before packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rl_dump import RaggedArray
from rl_metrics import rollout_denominators
from rl_schedule import SchedulePlan, ScheduleRequest, build_dp_schedule, check_plan

from rl_runtime.batch import Column, RankBatch, take_columns
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import BatchMismatchError

__all__ = ["Assignment", "assign_batch", "loss_denominators", "step_units"]


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
    request = _request(columns, recipe)
    plan = build_dp_schedule(**request)
    problems = check_plan(plan, ScheduleRequest(**request))
    if problems:
        msg = f"batch {batch_id}: the plan breaks its promises: " + "; ".join(str(problem) for problem in problems)
        raise BatchMismatchError(msg)
    step = _step_of_each_sample(plan, num_samples=len(columns["total_lengths"]))
    aggregation = recipe.algorithm.loss_aggregation
    planned = {**columns, "step": step, "loss_denominators": loss_denominators(columns, step, aggregation)}
    units = step_units(columns, plan, step, aggregation)
    rank_batches = tuple(
        RankBatch(batch_id=batch_id, plan=view, columns=take_columns(planned, view.partition), step_units=units)
        for view in (plan.rank_view(rank) for rank in range(recipe.parallel.data))
    )
    return Assignment(plan=plan, columns=planned, rank_batches=rank_batches)


def _request(columns: Mapping[str, Column], recipe: Recipe) -> dict[str, object]:
    return {
        "total_lengths": columns["total_lengths"],
        "rollout_ids": columns["rollout_ids"],
        "global_batch_size": recipe.train.global_batch_size,
        "dp_size": recipe.parallel.data,
        "cp_size": recipe.parallel.context,
        "max_tokens_per_gpu": recipe.train.max_tokens_per_gpu,
        "balance": recipe.train.balance,
        "on_oversized": recipe.train.on_oversized,
        "on_trailing": recipe.train.on_trailing,
        "pad_to_multiple": 2 * recipe.parallel.context if recipe.parallel.context > 1 else 1,
    }


def _step_of_each_sample(plan: SchedulePlan, *, num_samples: int) -> npt.NDArray[np.int64]:
    step = np.full(num_samples, -1, np.int64)
    step_of_micro_batch = np.repeat(np.arange(len(plan.num_microbatches)), plan.num_microbatches)
    for partition, micro_batches in zip(plan.partitions, plan.micro_batch_indices, strict=True):
        for index, local in zip(step_of_micro_batch, micro_batches, strict=True):
            step[partition[local]] = index
    return step


def loss_denominators(columns: Mapping[str, Column], step: npt.NDArray[np.int64], aggregation: str) -> npt.NDArray[np.float32]:
    """What each sample's masked sum is divided by.

    Args:
        columns: with `loss_masks`, `rollout_ids`, `group_ids`.
        step: int64 [N], step of each sample.
        aggregation: token_mean (1), sample_mean (its own mask sum), rollout_mean (its rollout's), prompt_mean (its prompt group's in the step).

    Returns:
        float32 [N]; 0 counts as 1.
    """
    masks = list(_ragged(columns, "loss_masks"))
    if aggregation == "token_mean":
        return np.ones(len(masks), np.float32)
    return np.asarray(rollout_denominators(masks, _unit_of_each_sample(columns, step, aggregation)), np.float32)


def step_units(
    columns: Mapping[str, Column], plan: SchedulePlan, step: npt.NDArray[np.int64], aggregation: str
) -> npt.NDArray[np.int64]:
    """How many units (rollouts, samples or prompt groups) each step's loss is averaged over; for token_mean, its trained tokens.

    Returns:
        int64 [steps].
    """
    steps = range(len(plan.num_microbatches))
    if aggregation == "token_mean":
        trained = np.array([int(mask.sum()) for mask in _ragged(columns, "loss_masks")], np.int64)
        return np.array([trained[step == index].sum() for index in steps], np.int64)
    unit = _unit_of_each_sample(columns, step, aggregation)
    return np.array([np.unique(unit[step == index]).size for index in steps], np.int64)


def _unit_of_each_sample(columns: Mapping[str, Column], step: npt.NDArray[np.int64], aggregation: str) -> npt.NDArray[np.int64]:
    if aggregation == "sample_mean":
        return np.arange(step.size, dtype=np.int64)
    name = "rollout_ids" if aggregation == "rollout_mean" else "group_ids"
    # A prompt group may be spread over steps, and then counts in each of them by its part there.
    pairs = np.stack([step, np.asarray(columns[name], np.int64)], axis=1)
    return np.asarray(np.unique(pairs, axis=0, return_inverse=True)[1], np.int64).reshape(-1)


def _ragged(columns: Mapping[str, Column], name: str) -> RaggedArray:
    column = columns[name]
    assert isinstance(column, RaggedArray), name
    return column
