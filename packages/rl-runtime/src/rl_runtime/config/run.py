"""`[run]`: where a run lives, its random start and its deadline."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["RunSection"]


class RunSection(Section):
    """Where a run lives, its random start and its deadline."""

    dir: Path = Path("runs/quickstart")
    """Folder of everything the run writes. It must not exist yet."""

    rng: int = Field(default=0, ge=0)
    """Random start: initial weights, data draws and sampling all follow from it."""

    deadline_seconds: float = Field(default=3600.0, gt=0)
    """The run is ended, with an error, when it takes longer than this many seconds."""
