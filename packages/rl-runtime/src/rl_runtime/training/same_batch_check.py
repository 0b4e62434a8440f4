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
import torch
import torch.distributed as dist

from rl_dump import RaggedArray
from rl_runtime.batch.rank_batch import Column, RankBatch
from rl_runtime.errors import BatchMismatchError
from rl_runtime.megatron.parallel_state import Topology

__all__ = ["check_same_batch", "columns_digest"]

_DIGEST_BYTES = 32


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


def check_same_batch(batch: RankBatch, topology: Topology) -> None:
    """Compare the batch over all ranks.

    Args:
        batch: what this rank received.
        topology: this rank's place.

    Raises:
        BatchMismatchError: on every rank, when plans differ over ranks, when columns differ inside
            a data-parallel rank, or when a rank received another rank's part.
    """
    mine = [batch.plan.digest, columns_digest(batch.columns), _place_digest(batch)]
    local = torch.tensor(
        list(b"".join(bytes.fromhex(digest) for digest in mine)),
        dtype=torch.uint8,
        device=topology.device,
    )
    gathered = torch.empty(
        topology.world_size * local.numel(), dtype=torch.uint8, device=topology.device
    )
    dist.all_gather_into_tensor(gathered, local)
    table = gathered.cpu().numpy().reshape(topology.world_size, len(mine), _DIGEST_BYTES)
    plans, columns, places = (
        [row.tobytes().hex() for row in table[:, index]] for index in range(len(mine))
    )
    _compare("schedule plan", plans, list(range(topology.world_size)), batch.batch_id)
    ranks = {
        dp_rank: [
            rank for rank in range(topology.world_size) if topology.dp_rank_of(rank) == dp_rank
        ]
        for dp_rank in range(topology.dp_size)
    }
    for members in ranks.values():
        _compare("columns of one data-parallel rank", columns, members, batch.batch_id)
        _compare("batch id and data-parallel rank", places, members, batch.batch_id)
    if batch.plan.rank != topology.dp_rank:
        raise BatchMismatchError(
            f"batch {batch.batch_id}: rank {topology.rank} is data-parallel rank"
            f" {topology.dp_rank}, but was given the part of rank {batch.plan.rank}"
        )


def _place_digest(batch: RankBatch) -> str:
    return hashlib.sha256(f"{batch.batch_id}:{batch.plan.rank}".encode()).hexdigest()


def _compare(what: str, digests: list[str], ranks: list[int], batch_id: int) -> None:
    holders: dict[str, list[int]] = {}
    for rank in ranks:
        holders.setdefault(digests[rank], []).append(rank)
    if len(holders) > 1:
        held = "; ".join(f"{digest} on ranks {found}" for digest, found in holders.items())
        raise BatchMismatchError(
            f"batch {batch_id}: trainer ranks hold different data ({what}): {held}: send every rank"
            " the part of one plan"
        )
