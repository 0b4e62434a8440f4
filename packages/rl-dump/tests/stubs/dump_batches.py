"""Batches as a run makes them: groups, fan-out, tool tokens, nuclei, ranks and micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import rl_dump
from rl_dump import Dump, RaggedArray

Columns: TypeAlias = dict[str, Any]
"""Per field an array, a `RaggedArray` or a list: what `write_dump` takes."""
Pair: TypeAlias = tuple[Path, Path]
"""The rollout dump and the train dump of one batch."""

ALPHABET = "0123456789+-*= abcdefghijklmnopqrstuvwxyz.,?!\n"


def ragged(items: Any, dtype: Any) -> RaggedArray:
    return RaggedArray.from_list(list(items), dtype)


def items_of(dump: Dump, name: str) -> RaggedArray:
    """Return a column of one array per sample."""
    column = dump.column(name)
    assert isinstance(column, RaggedArray)
    return column


def numbers_of(dump: Dump, name: str) -> npt.NDArray[Any]:
    """Return a column of one number per sample."""
    column = dump.column(name)
    assert isinstance(column, np.ndarray)
    return column


def equal(found: object, expected: object) -> bool:
    """Say whether two columns are the same: kind, dtype and bits."""
    if isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        return (
            found.dtype == expected.dtype
            and found.shape == expected.shape
            and found.tobytes() == expected.tobytes()
        )
    return type(found) is type(expected) and bool(found == expected)


def batch(num_samples: int = 24, *, seed: int = 0, longest: int = 40) -> Columns:
    """Return the columns of a train batch.

    Every third rollout has two samples, every fourth response a hole in its mask.
    """
    rng = np.random.default_rng(seed)
    rollout_ids = np.sort(rng.integers(0, max(1, num_samples * 2 // 3), num_samples))
    responses = rng.integers(0, longest + 1, num_samples)
    prompts = rng.integers(1, 12, num_samples)
    masks = [np.ones(length, np.int32) for length in responses]
    for mask in masks[::4]:
        mask[len(mask) // 3 : len(mask) // 2] = 0
    log_probs = [(-rng.exponential(0.7, length)).astype(np.float32) for length in responses]
    rewards = rng.integers(0, 2, num_samples).astype(np.float64)
    sizes = [rng.integers(1, 5, length) for length in responses]
    tokens = [
        rng.integers(0, len(ALPHABET), prompt + length)
        for prompt, length in zip(prompts, responses, strict=True)
    ]
    kept = [
        np.concatenate(
            [
                np.r_[token, rng.integers(0, len(ALPHABET), size - 1)]
                for token, size in zip(ids[len(ids) - len(size_list) :], size_list, strict=True)
            ]
            or [np.zeros(0)]
        )
        for ids, size_list in zip(tokens, sizes, strict=True)
    ]
    return {
        "rollout_position": np.arange(num_samples),
        "sample_index": np.arange(num_samples) + 1000,
        "rollout_ids": rollout_ids,
        "group_ids": rollout_ids // 4,
        "tokens": ragged(tokens, np.int64),
        "total_lengths": prompts + responses,
        "response_lengths": responses,
        "loss_masks": ragged(masks, np.int32),
        "rewards": rewards - rewards.mean() if num_samples else rewards,
        "raw_reward": rewards,
        "truncated": rng.random(num_samples) < 0.1,
        "finish_reason": ["stop"] * num_samples,
        "log_probs": ragged(log_probs, np.float32),
        "rollout_log_probs": ragged(
            [part + rng.normal(0, 1e-3, len(part)) for part in log_probs], np.float32
        ),
        "advantages": ragged(
            [
                np.full(length, reward - 0.5)
                for length, reward in zip(responses, rewards, strict=True)
            ],
            np.float32,
        ),
        "entropy": ragged([rng.exponential(0.5, length) for length in responses], np.float32),
        "weight_versions": ragged([np.full(length, 3) for length in responses], np.int64),
        "nucleus_ids": ragged(kept, np.int32),
        "nucleus_offsets": ragged([np.r_[0, np.cumsum(size)] for size in sizes], np.int64),
        "nucleus_status": ragged([np.zeros(length) for length in responses], np.uint8),
        "loss_denominators": np.array([max(1, mask.sum()) for mask in masks], np.float32),
    }


def placed(
    columns: Columns, dp_size: int = 2, per_micro_batch: int = 3
) -> tuple[Columns, list[dict[str, Any]]]:
    """Spread a batch over ranks and micro-batches of one step.

    Returns its columns with their places, and the shards.
    """
    count = len(columns["rollout_position"])
    rank = np.arange(count) % dp_size
    local = np.arange(count) // dp_size
    shards = []
    for shard in range(dp_size):
        partition = np.flatnonzero(rank == shard)
        indices = [
            list(range(start, min(start + per_micro_batch, len(partition))))
            for start in range(0, len(partition), per_micro_batch)
        ]
        shards.append(
            {
                "rank": shard,
                "data_parallel_rank": shard,
                "sample_indices": columns["sample_index"][partition].tolist(),
                "partition": partition.tolist(),
                "micro_batch_indices": indices,
                "num_microbatches": [len(indices)],
                "global_batch_sizes": [len(np.unique(columns["rollout_ids"]))],
            }
        )
    places = {
        "step": np.zeros(count, np.int64),
        "micro_batch": local // per_micro_batch,
        "data_parallel_rank": rank,
    }
    return {**columns, **places}, shards


def taken(columns: Columns, rows: Any) -> Columns:
    """Return the batch's samples at `rows`."""
    return {
        name: (
            [column[row] for row in rows]
            if isinstance(column, list)
            else column.take(rows)
            if isinstance(column, RaggedArray)
            else column[rows]
        )
        for name, column in columns.items()
    }


def text_of(ids: Any) -> str:
    return "".join(ALPHABET[number] for number in ids)


def rollout_columns(columns: Columns) -> Columns:
    """Return what the rollout dump of the same batch holds."""
    names = [
        "rollout_position",
        "sample_index",
        "rollout_ids",
        "group_ids",
        "tokens",
        "total_lengths",
        "response_lengths",
        "loss_masks",
        "raw_reward",
    ]
    names += [
        "truncated",
        "finish_reason",
        "rollout_log_probs",
        "weight_versions",
        "nucleus_ids",
        "nucleus_offsets",
        "nucleus_status",
    ]
    split = [
        (ids[: len(ids) - length], ids[len(ids) - length :])
        for ids, length in zip(columns["tokens"], columns["response_lengths"].tolist(), strict=True)
    ]
    texts = {
        "prompt": [text_of(prompt) for prompt, _ in split],
        "response": [text_of(response) for _, response in split],
        "label": ["42"] * len(split),
        "metadata": [{"difficulty": row % 3} for row in range(len(split))],
    }
    return {**{name: columns[name] for name in names}, **texts}


def write_pair(
    folder: Path,
    num_samples: int = 24,
    *,
    batch_id: int | str = 0,
    seed: int = 0,
    longest: int = 40,
    suffix: str = ".parquet",
) -> Pair:
    """Write the rollout dump and the train dump of one batch."""
    columns, shards = placed(batch(num_samples, seed=seed, longest=longest))
    write = rl_dump.write_dump
    if suffix == ".pt":
        from rl_dump.torch import write_torch_archive as write
    rollout = write(
        folder / f"rollout_{batch_id}{suffix}",
        contract="rollout-dump.v1",
        batch_id=batch_id,
        columns=rollout_columns(columns),
    )
    train = write(
        folder / f"train_{batch_id}{suffix}",
        contract="train-dump.v2",
        batch_id=batch_id,
        columns=columns,
        dp_shards=shards,
        raw_reward=columns["raw_reward"].tolist(),
    )
    return rollout, train


def write_tokenizer(folder: Path) -> Path:
    """Write a character tokenizer."""
    document = {
        "model": {
            "type": "WordLevel",
            "vocab": {char: number for number, char in enumerate(ALPHABET)},
        },
        "added_tokens": [],
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(document))
    return path
