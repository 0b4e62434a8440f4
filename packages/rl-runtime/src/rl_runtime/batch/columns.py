"""From scored rollouts to the columns of one batch.

Invariants: one entry per sample in rollout order; `rollout_position` is the entry's index; dtypes
are those of `rollout-batch.v1`; kept sets are present for all samples or for none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from rl_dump import RaggedArray
from rl_runtime.algorithms.group_rewards import normalise_group_rewards
from rl_runtime.batch.rank_batch import Column
from rl_runtime.errors import GenerateError, RewardError
from rl_runtime.records.rollout_types import PromptGroup, Sample
from rl_topp import NucleusSet

__all__ = ["ABSENT_INDEX", "batch_columns", "flatten_groups", "scores_by_rollout"]

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
        Columns by name. Kept sets come as `nucleus_ids`, `nucleus_offsets`, `nucleus_status` where
        the samples carry them.

    Raises:
        RewardError: a sample has no reward.
        GenerateError: some samples carry kept sets or full log-probs and others do not.
    """
    _check(samples)
    rollout_ids = np.array([sample.rollout_id for sample in samples], np.int64)
    group_ids = np.array([sample.group_id for sample in samples], np.int64)
    raw_reward = np.array([sample.reward for sample in samples], np.float64)
    response_lengths = np.array([sample.response_tokens.size for sample in samples], np.int64)
    prompt_lengths = np.array([sample.prompt_tokens.size for sample in samples], np.int64)
    columns: dict[str, Column] = {
        "rollout_position": np.arange(len(samples), dtype=np.int64),
        "sample_index": np.array(
            [
                ABSENT_INDEX if sample.sample_index is None else sample.sample_index
                for sample in samples
            ],
            np.int64,
        ),
        "rollout_ids": rollout_ids,
        "group_ids": group_ids,
        "tokens": _ragged(
            samples,
            lambda sample: np.concatenate([sample.prompt_tokens, sample.response_tokens]),
            np.int64,
        ),
        "total_lengths": prompt_lengths + response_lengths,
        "response_lengths": response_lengths,
        "loss_masks": _ragged(samples, lambda sample: sample.loss_mask, np.int32),
        "raw_reward": raw_reward,
        "rewards": normalise_group_rewards(
            raw_reward, rollout_ids, group_ids, divide_by_std=divide_by_std
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
    sets = [sample.nucleus for sample in samples if sample.nucleus is not None]
    if sets:
        columns |= _nucleus_columns(sets)
    return columns


def _nucleus_columns(sets: Sequence[NucleusSet]) -> dict[str, Column]:
    return {
        "nucleus_ids": RaggedArray.from_list([item.ids for item in sets], np.int32),
        "nucleus_offsets": RaggedArray.from_list([item.offsets for item in sets], np.int64),
        "nucleus_status": RaggedArray.from_list([item.status for item in sets], np.uint8),
    }


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


def scores_by_rollout(groups: Sequence[PromptGroup]) -> dict[str, list[float]]:
    """Collect reward and further scores, each rollout once.

    Returns:
        Lists by name, with "reward" among them.
    """
    scores: dict[str, list[float]] = {}
    for rollout in chain.from_iterable(group.rollouts for group in groups):
        last = rollout.samples[-1]
        for name, value in {"reward": last.reward, **last.scores}.items():
            if value is not None:
                scores.setdefault(name, []).append(value)
    return scores
