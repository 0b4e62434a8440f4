"""How one Megatron-Core parameter lays out Hugging Face tensors over tensor-parallel ranks.

Each layout is a pair of inverse functions: `shard` takes the full Hugging Face tensors to one
rank's parameter, `merge` takes the parameters of all ranks back. Both only cut, order and copy, so
a round trip is exact bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["FusedGateUp", "FusedQkv", "Layout", "Replicated", "SplitColumns", "SplitVocabulary"]


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same tensor on every rank (norms)."""

    def shard(self, tensors: Sequence[torch.Tensor], tp_rank: int, tp_size: int) -> torch.Tensor:
        """Return the one tensor."""
        del tp_rank, tp_size
        return tensors[0]

    def merge(self, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the first rank's tensor."""
        return (shards[0],)


@dataclass(frozen=True, slots=True)
class SplitColumns:
    """Equal consecutive parts of dimension 1 (the inputs of a row-parallel projection)."""

    def shard(self, tensors: Sequence[torch.Tensor], tp_rank: int, tp_size: int) -> torch.Tensor:
        """Cut the rank's columns of [out, in]."""
        return tensors[0].chunk(tp_size, dim=1)[tp_rank]

    def merge(self, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Lay the columns side by side."""
        return (torch.cat(list(shards), dim=1),)


@dataclass(frozen=True, slots=True)
class SplitVocabulary:
    """Equal consecutive shares of the vocabulary, padded with zero rows to a multiple of ranks."""

    vocab_size: int
    """Rows of the full tensor."""

    def shard(self, tensors: Sequence[torch.Tensor], tp_rank: int, tp_size: int) -> torch.Tensor:
        """Cut the rank's rows. 5 rows on 2 ranks: 3 rows each, the last one zero."""
        rows = -(-self.vocab_size // tp_size)
        part = tensors[0][tp_rank * rows : (tp_rank + 1) * rows]
        missing = rows - part.shape[0]
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part

    def merge(self, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Lay the rows end to end and drop the padding."""
        return (torch.cat(list(shards))[: self.vocab_size],)


@dataclass(frozen=True, slots=True)
class FusedGateUp:
    """Gate and up projection in one tensor: each rank's share of the gate, then of the other."""

    def shard(self, tensors: Sequence[torch.Tensor], tp_rank: int, tp_size: int) -> torch.Tensor:
        """Cut the rank's rows of both, gate first."""
        return torch.cat([tensor.chunk(tp_size)[tp_rank] for tensor in tensors])

    def merge(self, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Separate the halves of every rank and join them."""
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[0] for half in halves]), torch.cat([half[1] for half in halves])


@dataclass(frozen=True, slots=True)
class FusedQkv:
    """Query, key and value in one tensor, group by group.

    A group is the query heads that share a key-value head, then that key head, then that value
    head.
    """

    num_groups: int
    """Key-value heads of the whole model."""
    heads_per_group: int
    """Query heads that share one key-value head."""
    head_dim: int
    """Width of one head."""

    def shard(self, tensors: Sequence[torch.Tensor], tp_rank: int, tp_size: int) -> torch.Tensor:
        """Interleave the rank's groups; tensors are weights [out, in] or biases [out]."""
        rest = tensors[0].shape[1:]
        # [groups, rows of the group, in], of which a rank holds some whole groups.
        grouped = [
            tensor.reshape(self.num_groups, -1, *rest).chunk(tp_size)[tp_rank] for tensor in tensors
        ]
        return torch.cat(grouped, dim=1).reshape(-1, *rest)

    def merge(self, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Separate the groups of all ranks."""
        rest = shards[0].shape[1:]
        rows = (self.heads_per_group + 2) * self.head_dim
        grouped = torch.cat([shard.reshape(-1, rows, *rest) for shard in shards])
        parts = torch.split(
            grouped, [self.heads_per_group * self.head_dim, self.head_dim, self.head_dim], dim=1
        )
        return tuple(part.reshape(-1, *rest) for part in parts)


Layout = Replicated | SplitColumns | SplitVocabulary | FusedGateUp | FusedQkv
"""Any of them."""
