"""Which ranks take part in a train dump, and in which role.

Every context-parallel rank of the last pipeline stage's first tensor rank helps to restore; its
context rank 0 sends the shard of its data-parallel rank; the first data-parallel rank of those
writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from rl_dump.errors import DumpError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DumpTopology"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpTopology:
    """Where a process stands in the parallel layout.

    Example, one process: `DumpTopology(global_rank=0)`.

    Raises:
        DumpError: a rank is outside its axis, or the group does not fit the data-parallel axis.
    """

    global_rank: int
    """Rank in the world, 0-based."""
    dp_rank: int = 0
    """Rank on the data-parallel axis, without context parallel."""
    dp_size: int = 1
    """Size of the data-parallel axis."""
    cp_rank: int = 0
    """Rank on the context-parallel axis."""
    cp_size: int = 1
    """Size of the context-parallel axis."""
    tp_rank: int = 0
    """Rank on the tensor-parallel axis."""
    tp_size: int = 1
    """Size of the tensor-parallel axis."""
    pp_rank: int = 0
    """Rank on the pipeline axis."""
    pp_size: int = 1
    """Size of the pipeline axis."""
    shard_group: ProcessGroup | None = None
    """Gloo group over the shard senders, in data-parallel order, for dumps only.

    None if `dp_size` is 1 or this rank sends no shard.
    """
    deadline_seconds: float = 600.0
    """Longest wait for one message of another shard sender."""

    def __post_init__(self) -> None:
        for axis in ("dp", "cp", "tp", "pp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise DumpError(f"{axis}_rank {rank} is not below {axis}_size {size}")
        if self.deadline_seconds <= 0:
            raise DumpError(f"deadline_seconds must be positive, got {self.deadline_seconds}")
        if self.is_shard_sender and self.dp_size > 1:
            self._check_group()

    @property
    def takes_part(self) -> bool:
        """Whether this rank joins the restoring collectives: last pipeline stage, tensor rank 0."""
        return self.pp_rank == self.pp_size - 1 and self.tp_rank == 0

    @property
    def is_shard_sender(self) -> bool:
        """Whether this rank holds its data-parallel rank's shard: takes part, context rank 0."""
        return self.takes_part and self.cp_rank == 0

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the file: the shard sender of data-parallel rank 0."""
        return self.is_shard_sender and self.dp_rank == 0

    def _check_group(self) -> None:
        if self.shard_group is None:
            raise DumpError(
                f"rank {self.global_rank}: dp_size is {self.dp_size}, so shard_group must be a gloo"
                f" group over the {self.dp_size} shard senders"
            )
        rank, size = dist.get_rank(self.shard_group), dist.get_world_size(self.shard_group)
        if (rank, size) != (self.dp_rank, self.dp_size):
            raise DumpError(
                f"rank {self.global_rank}: shard_group has this rank at {rank} of {size}, the"
                f" data-parallel axis at {self.dp_rank} of {self.dp_size}"
            )
        if dist.get_backend(self.shard_group) != "gloo":
            raise DumpError(
                f"rank {self.global_rank}: shard_group runs on"
                f" {dist.get_backend(self.shard_group)}; shards are sent from the CPU, over gloo"
            )
