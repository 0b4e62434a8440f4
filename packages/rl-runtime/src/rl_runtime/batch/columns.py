"""From scored rollouts to the columns of one batch.

Invariants: one entry per sample in rollout order; `rollout_position` is the entry's index; dtypes
are those of the documentation's field table; nuclei are present for all samples or for none.

Axes: N samples of the batch, P prompt and R response tokens of one sample, nnz ids of its nuclei.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rl_dump import RaggedArray
from rl_runtime.algorithms.group_rewards import normalise_group_rewards
from rl_runtime.batch.rank_batch import Column
from rl_runtime.errors import GenerateError, RewardError
from rl_runtime.records import PromptGroup, Sample

__all__ = ["ABSENT_INDEX", "batch_columns", "flatten_groups"]

ABSENT_INDEX = -1
"""Value of `sample_index` where the data source gave none."""


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
        Columns by name. Nuclei come as `nucleus_ids`, `nucleus_offsets`, `nucleus_status` where
        the samples carry them.

    Raises:
        RewardError: a sample has no reward.
        GenerateError: some samples carry nuclei or full log-probs and others do not.
    """
    _check(samples)
    rollout_ids_N = np.array([sample.rollout_id for sample in samples], np.int64)
    group_ids_N = np.array([sample.group_id for sample in samples], np.int64)
    raw_reward_N = np.array([sample.reward for sample in samples], np.float64)
    response_lengths_N = np.array([sample.response_tokens.size for sample in samples], np.int64)
    prompt_lengths_N = np.array([sample.prompt_tokens.size for sample in samples], np.int64)
    columns: dict[str, Column] = {
        "rollout_position": np.arange(len(samples), dtype=np.int64),
        "sample_index": np.array(
            [
                ABSENT_INDEX if sample.sample_index is None else sample.sample_index
                for sample in samples
            ],
            np.int64,
        ),
        "rollout_ids": rollout_ids_N,
        "group_ids": group_ids_N,
        "tokens": _ragged(
            samples,
            lambda sample: np.concatenate([sample.prompt_tokens, sample.response_tokens]),
            np.int64,
        ),
        "total_lengths": prompt_lengths_N + response_lengths_N,
        "response_lengths": response_lengths_N,
        "loss_masks": _ragged(samples, lambda sample: sample.loss_mask, np.int32),
        "raw_reward": raw_reward_N,
        "rewards": normalise_group_rewards(
            raw_reward_N, rollout_ids_N, group_ids_N, divide_by_std=divide_by_std
        ),
        "rollout_log_probs": _ragged(samples, lambda sample: sample.rollout_log_probs, np.float32),
        "weight_versions": _ragged(samples, lambda sample: sample.weight_versions, np.int64),
        "truncated": np.array([sample.truncated for sample in samples], np.bool_),
    }
    full = [
        sample.rollout_full_log_probs
        for sample in samples
        if sample.rollout_full_log_probs is not None
    ]
    if full:
        columns["rollout_full_log_probs"] = RaggedArray.from_list(full, np.float32)
    nuclei = [sample.nucleus for sample in samples if sample.nucleus is not None]
    if nuclei:
        # Offsets stay those of each sample, from 0 to its nnz: R + 1 of them, not R.
        columns["nucleus_ids"] = RaggedArray.from_list([item.ids for item in nuclei], np.int32)
        columns["nucleus_offsets"] = RaggedArray.from_list(
            [item.offsets for item in nuclei], np.int64
        )
        columns["nucleus_status"] = RaggedArray.from_list(
            [item.status for item in nuclei], np.uint8
        )
    return columns


def _ragged(
    samples: Sequence[Sample],
    take: Callable[[Sample], npt.NDArray[np.generic]],
    dtype: type[np.generic],
) -> RaggedArray:
    return RaggedArray.from_list([take(sample) for sample in samples], dtype)


def _check(samples: Sequence[Sample]) -> None:
    unscored = sorted({sample.rollout_id for sample in samples if sample.reward is None})
    if unscored:
        raise RewardError(
            f"rollouts {unscored[:8]} have no reward: score every rollout before it enters a batch"
        )
    for name, present in (
        ("kept sets (nucleus)", [sample.nucleus is not None for sample in samples]),
        (
            "rollout_full_log_probs",
            [sample.rollout_full_log_probs is not None for sample in samples],
        ),
    ):
        if any(present) and not all(present):
            without = [
                sample.rollout_id for sample, has in zip(samples, present, strict=True) if not has
            ]
            raise GenerateError(
                f"rollouts {without[:8]} have no {name}, but others of the batch do: a batch has"
                " them for all samples or for none"
            )
