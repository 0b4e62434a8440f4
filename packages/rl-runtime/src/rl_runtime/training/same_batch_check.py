"""Do all trainer ranks hold the same batch?

Ranks that trained on different plans would wait for each other's collectives for ever. So before a
batch starts, every rank shows the plan's digest to every other, and ranks of one data-parallel rank
also compare what they received.

Invariants: either all ranks go on or all raise; the message names both digests and the ranks that
hold them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch.distributed as dist

from rl_dump import RaggedArray
from rl_runtime.batch.rank_batch import Column, RankBatch
from rl_runtime.errors import BatchMismatchError
from rl_runtime.megatron.parallel_state import Topology

__all__ = ["check_same_batch", "columns_digest"]


def columns_digest(columns: Mapping[str, Column]) -> str:
    """Fingerprint columns: sha256 in hex over names, dtypes and bytes, in the order of names."""
    state = hashlib.sha256()
    for name, column in sorted(columns.items()):
        arrays = (
            (column.values, column.offsets)
            if isinstance(column, RaggedArray)
            else (np.asarray(column),)
        )
        state.update(f"{name}:{[array.dtype.str for array in arrays]};".encode())
        for array in arrays:
            state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()


def check_same_batch(rank_batch: RankBatch, topology: Topology) -> None:
    """Compare the batch over all ranks.

    Args:
        rank_batch: what this rank received.
        topology: this rank's place.

    Raises:
        BatchMismatchError: on every rank, when plans differ over ranks or columns inside a
            data-parallel rank; on the rank that it was given to, for another rank's share.
    """
    mine = (
        rank_batch.plan.digest,
        columns_digest(rank_batch.columns),
        f"batch {rank_batch.batch_id} of data-parallel rank {rank_batch.plan.rank}",
    )
    shown = [mine] * topology.world_size
    dist.all_gather_object(shown, mine)
    plans, columns, places = (dict(enumerate(values)) for values in zip(*shown, strict=True))
    _compare("schedule plan", plans, rank_batch.batch_id)
    for dp_rank in range(topology.dp_size):
        members = [rank for rank in plans if topology.dp_rank_of(rank) == dp_rank]
        for what, values in (
            ("columns of one data-parallel rank", columns),
            ("batch id and data-parallel rank", places),
        ):
            _compare(what, {rank: values[rank] for rank in members}, rank_batch.batch_id)
    if rank_batch.plan.rank != topology.dp_rank:
        raise BatchMismatchError(
            f"batch {rank_batch.batch_id}: rank {topology.rank} is data-parallel rank"
            f" {topology.dp_rank}, but was given the share of rank {rank_batch.plan.rank}"
        )


def _compare(what: str, values: Mapping[int, str], batch_id: int) -> None:
    """Raise unless all ranks hold the same value."""
    holders = {
        value: [rank for rank in values if values[rank] == value] for value in values.values()
    }
    if len(holders) > 1:
        held = "; ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
        raise BatchMismatchError(
            f"batch {batch_id}: trainer ranks hold different data ({what}): {held}: send every rank"
            " its share of one plan"
        )
