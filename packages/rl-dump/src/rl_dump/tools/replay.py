"""What of a dump is needed to run one micro-batch again, alone.

The result is a train dump of its own: whatever reads dumps reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from rl_dump.atomic import refuse_input
from rl_dump.contract import TRAIN_DUMP, DumpHeader
from rl_dump.errors import DumpError
from rl_dump.reader import Dump
from rl_dump.tools.convert import write_columns
from rl_dump.tools.token_statistics import scalar_field

__all__ = ["REPLAY_KEY", "export_micro_batch"]

REPLAY_KEY = "replay"
"""Key of the exported dump's metadata that says where the micro-batch comes from."""


def export_micro_batch(
    dump: Dump,
    target: str | os.PathLike[str],
    *,
    step: int,
    data_parallel_rank: int,
    micro_batch: int,
) -> Path:
    """Write one micro-batch of a train dump to a file of its own.

    The file holds the samples with all their fields (their loss denominators are those of the whole
    step), one shard with one micro-batch, and under `metadata["replay"]` the step, rank and
    micro-batch they come from, with `num_microbatches` and `global_batch_size` of that step where
    the dump notes them.

    Args:
        dump: a train dump.
        target: the file to write, `.parquet` or `.pt`.
        step: optimizer step within the batch, 0-based.
        data_parallel_rank: rank that ran it.
        micro_batch: micro-batch within the step on that rank, 0-based.

    Raises:
        DumpError: not a train dump, it does not say where samples ran, or there is no such
            micro-batch; the message says what there is. Or the target is the dump itself.
        WriteError: the file system refused.
    """
    refuse_input(target, dump.path)
    rows = _rows(dump, step, data_parallel_rank, micro_batch)
    columns = {name: column.take(rows) for name, column in dump.columns().items()}
    shard = next(
        (
            shard
            for shard in dump.dp_shards
            if shard.get("data_parallel_rank") == data_parallel_rank
        ),
        {},
    )
    sizes = {
        key: values[step]
        if isinstance(values := shard.get(name), list) and 0 <= step < len(values)
        else None
        for key, name in (("num_microbatches",) * 2, ("global_batch_size", "global_batch_sizes"))
    }
    source: dict[str, Any] = {
        "step": step,
        "data_parallel_rank": data_parallel_rank,
        "micro_batch": micro_batch,
        "file": dump.path.name,
        **sizes,
    }
    one_shard: dict[str, Any] = {
        "rank": shard.get("rank", 0),
        "data_parallel_rank": data_parallel_rank,
        "partition": dump.positions()[rows].tolist(),
        "micro_batch_indices": [list(range(len(rows)))],
        "num_microbatches": [1],
        "global_batch_sizes": (
            None if sizes["global_batch_size"] is None else [sizes["global_batch_size"]]
        ),
    }
    header: DumpHeader = {
        **dump.header,
        "num_samples": len(rows),
        "dp_shards": [one_shard],
        "raw_reward": None,
        "schedule": None,
        "dropped": [],
        "metadata": {**dump.metadata, REPLAY_KEY: source},
    }
    return write_columns(target, header, columns)


def _rows(
    dump: Dump, step: int, rank: int, micro_batch: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if dump.contract != TRAIN_DUMP:
        raise DumpError(
            f"{dump.path}: a {dump.contract}; only a {TRAIN_DUMP} says which samples ran together"
        )
    found = [scalar_field(dump, name) for name in ("step", "data_parallel_rank", "micro_batch")]
    if any(column is None for column in found):
        raise DumpError(
            f"{dump.path}: has no step, data_parallel_rank and micro_batch for its samples; it was"
            " written without micro_batch_indices"
        )
    places = np.stack([np.asarray(column, np.int64) for column in found], axis=1)
    rows = np.flatnonzero((places == [step, rank, micro_batch]).all(axis=1))
    if not rows.size:
        highest = places.max(axis=0).tolist() if len(places) else []
        raise DumpError(
            f"{dump.path}: no sample ran in step {step}, rank {rank}, micro-batch {micro_batch} (a"
            " filler holds none); the highest are"
            f" {dict(zip(('step', 'rank', 'micro-batch'), highest, strict=False))}"
        )
    return rows
