"""Context-parallel cuts for tests, and their inverse: zigzag, and parts of a packed stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rl_dump import RaggedArray
from rl_dump.torch import GatherTensor

from .dump_batches import Columns, taken


def owned(total: int, response: int, rank: int, size: int) -> list[int]:
    """Return the response indices whose logits a rank holds: chunk r and its mirror image."""
    chunk = -(-total // (2 * size))
    first = response_start = total - response - 1
    positions = [
        *range(rank * chunk, (rank + 1) * chunk),
        *range((2 * size - 1 - rank) * chunk, (2 * size - rank) * chunk),
    ]
    return [position - first for position in positions if response_start <= position < total - 1]


def cut(full: torch.Tensor, total: int, rank: int, size: int) -> torch.Tensor:
    return full[owned(total, len(full), rank, size)]


def gatherer(
    rank: int, size: int, group: dist.ProcessGroup | None
) -> tuple[GatherTensor, list[int]]:
    """Return a `gather_tensor` of one all-reduce, and the list of the bytes each call restored."""
    restored = []

    def gather(
        pieces: Sequence[torch.Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        samples: range,
    ) -> list[torch.Tensor]:
        flat = torch.zeros(sum(response_lengths), dtype=pieces[0].dtype)
        start = 0
        for piece, total, response in zip(pieces, total_lengths, response_lengths, strict=True):
            flat[[start + index for index in owned(total, response, rank, size)]] = piece
            start += response
        restored.append(flat.nbytes)
        dist.all_reduce(flat, group=group)
        return list(torch.split(flat, list(response_lengths)))

    return gather, restored


@dataclass(frozen=True)
class Stream:
    """Where one sample lies: at `offset` of a stream of `length` tokens, a part on each rank."""

    offset: int
    length: int

    def owned(self, total: int, response: int, rank: int, size: int) -> list[int]:
        """Return the response indices whose logits lie in the part of rank `rank` of `size`."""
        part = self.length // size
        first = self.offset + total - response - 1
        return [
            row - first
            for row in range(first, first + response)
            if rank * part <= row < (rank + 1) * part
        ]


def stream_gatherer(
    streams: list[Stream], rank: int, size: int, group: dist.ProcessGroup | None
) -> GatherTensor:
    """Return a `gather_tensor` for the contiguous layout: it looks samples up by their number."""

    def gather(
        pieces: Sequence[torch.Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        samples: range,
    ) -> list[torch.Tensor]:
        flat = torch.zeros(sum(response_lengths), dtype=pieces[0].dtype)
        start = 0
        for piece, total, response, sample in zip(
            pieces, total_lengths, response_lengths, samples, strict=True
        ):
            flat[
                [start + index for index in streams[sample].owned(total, response, rank, size)]
            ] = piece
            start += response
        dist.all_reduce(flat, group=group)
        return list(torch.split(flat, list(response_lengths)))

    return gather


CP_FIELDS = ("log_probs", "rollout_log_probs", "advantages", "entropy")


def trainer_shard(
    columns: Columns, shard: dict[str, Any], cp_rank: int = 0, cp_size: int = 1
) -> dict[str, Any]:
    """Return what a context rank of a data-parallel rank holds: its samples, their floats cut."""
    part = taken(columns, shard["partition"])
    data = {}
    for name, column in part.items():
        if name in {"rollout_position", "step", "micro_batch", "data_parallel_rank"}:
            continue
        if isinstance(column, RaggedArray):
            items = [torch.from_numpy(item.copy()) for item in column]
            if name in CP_FIELDS:
                items = [
                    cut(item, int(total), cp_rank, cp_size)
                    for item, total in zip(items, part["total_lengths"], strict=True)
                ]
            data[name] = items
        else:
            data[name] = column if isinstance(column, list) else column.tolist()
    keys = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")
    return {**data, **{key: shard[key] for key in keys}}
