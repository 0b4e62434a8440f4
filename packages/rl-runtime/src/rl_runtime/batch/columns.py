"""From scored rollouts to the columns of one batch.

Invariants: one entry per sample in rollout order; `rollout_position` is the entry's index; dtypes
are those of `COLUMN_TYPES`; nuclei are present for all samples or for none.

Axes: N samples of the batch, R response tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_dump import RaggedArray
from rl_runtime.algorithms.advantages import normalise_group_rewards
from rl_runtime.batch.rank_batch import Column
from rl_runtime.errors import GenerateError, RewardError
from rl_runtime.records import PromptGroup, Sample

__all__ = [
    "ABSENT_INDEX",
    "COLUMN_TYPES",
    "batch_columns",
    "column_problem",
    "flatten_groups",
    "unknown_id_problem",
]

ABSENT_INDEX = -1
"""Value of `sample_index` where the data source gave none."""

COLUMN_TYPES: Mapping[str, tuple[str, bool]] = {
    "rollout_position": ("int64", False),
    "sample_index": ("int64", False),
    "rollout_ids": ("int64", False),
    "group_ids": ("int64", False),
    "tokens": ("int64", True),
    "total_lengths": ("int64", False),
    "response_lengths": ("int64", False),
    "loss_masks": ("int32", True),
    "raw_reward": ("float64", False),
    "rewards": ("float64", False),
    "rollout_log_probs": ("float32", True),
    "weight_versions": ("int64", True),
    "truncated": ("bool", False),
    "rollout_full_log_probs": ("float32", True),
    "nucleus_ids": ("int32", True),
    "nucleus_offsets": ("int64", True),
    "nucleus_status": ("uint8", True),
}
"""By name, in the order of a dump: dtype, and whether a sample has an array of its own."""


def flatten_groups(groups: Sequence[PromptGroup]) -> list[Sample]:
    """List all samples in rollout order: group by group, rollout by rollout, sibling by sibling."""
    return [sample for group in groups for rollout in group.rollouts for sample in rollout.samples]


def batch_columns(samples: Sequence[Sample], *, divide_by_std: bool) -> dict[str, Column]:
    """Assemble the columns of one batch, with rewards normalised by prompt group.

    Args:
        samples: scored samples in rollout order.
        divide_by_std: whether group-normalised rewards are divided by the group's standard
            deviation.

    Returns:
        Columns by name. Nuclei and log-probs over the vocabulary are among them where the samples
        carry them.

    Raises:
        RewardError: a sample has no reward.
        GenerateError: some samples carry nuclei or full log-probs and others do not.
    """
    _check(samples)
    raw_reward_N = np.array([sample.reward for sample in samples], np.float64)
    rollout_ids_N = np.array([sample.rollout_id for sample in samples], np.int64)
    group_ids_N = np.array([sample.group_id for sample in samples], np.int64)
    full = [sample.rollout_full_log_probs for sample in samples]
    nuclei = [sample.nucleus for sample in samples if sample.nucleus is not None]
    values: dict[str, Sequence[Any] | np.ndarray[Any, Any]] = {
        "rollout_position": range(len(samples)),
        "sample_index": [
            ABSENT_INDEX if sample.sample_index is None else sample.sample_index
            for sample in samples
        ],
        "rollout_ids": rollout_ids_N,
        "group_ids": group_ids_N,
        "tokens": [
            np.concatenate([sample.prompt_tokens, sample.response_tokens]) for sample in samples
        ],
        "total_lengths": [
            sample.prompt_tokens.size + sample.response_tokens.size for sample in samples
        ],
        "response_lengths": [sample.response_tokens.size for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "raw_reward": raw_reward_N,
        "rewards": normalise_group_rewards(
            raw_reward_N, rollout_ids_N, group_ids_N, divide_by_std=divide_by_std
        ),
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "weight_versions": [sample.weight_versions for sample in samples],
        "truncated": [sample.truncated for sample in samples],
        "rollout_full_log_probs": [item for item in full if item is not None],
        "nucleus_ids": [item.ids for item in nuclei],
        # Each sample's own offsets, from 0 to the number of its ids: R + 1 of them.
        "nucleus_offsets": [item.offsets for item in nuclei],
        "nucleus_status": [item.status for item in nuclei],
    }
    return {
        name: RaggedArray.from_list(values[name], dtype)
        if is_ragged
        else np.array(values[name], dtype)
        for name, (dtype, is_ragged) in COLUMN_TYPES.items()
        # A column is short only where no sample carries it: `_check` refused a mixture.
        if len(values[name]) == len(samples)
    }


def column_problem(name: str, column: Column) -> str | None:
    """Say what is wrong with the type of a column, or None."""
    dtype, is_ragged = COLUMN_TYPES[name]
    if isinstance(column, RaggedArray) != is_ragged:
        return f"{name} must have {'one array' if is_ragged else 'one value'} per sample"
    found = (column.values if isinstance(column, RaggedArray) else column).dtype.name
    return None if found == dtype else f"{name} has dtype {found}, not {dtype}"


def unknown_id_problem(columns: Mapping[str, Column], vocab_size: int) -> str | None:
    """Say which column holds an id that a model of `vocab_size` ids does not have, or None."""
    highest = {
        name: int(column.values.max())
        for name in ("tokens", "nucleus_ids")
        if isinstance(column := columns.get(name), RaggedArray) and column.values.size
    }
    return next(
        (
            f"field {name} has id {value}, but the model has {vocab_size} ids"
            for name, value in highest.items()
            if value >= vocab_size
        ),
        None,
    )


def _check(samples: Sequence[Sample]) -> None:
    unscored = sorted({sample.rollout_id for sample in samples if sample.reward is None})
    if unscored:
        raise RewardError(
            f"rollouts {unscored[:8]} have no reward: score every rollout before it enters a batch"
        )
    for name, values in (
        ("kept sets", [sample.nucleus for sample in samples]),
        ("rollout_full_log_probs", [sample.rollout_full_log_probs for sample in samples]),
    ):
        without = [
            sample.rollout_id
            for sample, value in zip(samples, values, strict=True)
            if value is None
        ]
        if 0 < len(without) < len(samples):
            raise GenerateError(
                f"rollouts {without[:8]} have no {name}, but others of the batch do: a batch has"
                " them for all samples or for none"
            )
