"""`[checkpoint]`: saving and resuming. Layer: config."""

from __future__ import annotations

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["CheckpointSection"]


class CheckpointSection(Section):
    """Saving and resuming."""

    dir: str = "{run_dir}/checkpoints"
    """Folder of the checkpoints."""

    interval: int = Field(default=0, ge=0)
    """Batches between two checkpoints. 0: only the last weights are exported."""
