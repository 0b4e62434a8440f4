"""`[parallel]`: how trainer ranks divide the work."""

from __future__ import annotations

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["ParallelSection"]


class ParallelSection(Section):
    """Sizes of the trainer's mesh. The number of trainer ranks is their product."""

    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel ranks."""

    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages."""

    context: int = Field(default=1, ge=1)
    """Context-parallel ranks (zigzag layout)."""

    data: int = Field(default=2, ge=1)
    """Data-parallel ranks, without context parallelism."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks: the product of all axes."""
        return self.tensor * self.pipeline * self.context * self.data
