"""`[eval]`: held-out evaluation."""

from __future__ import annotations

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["EvalSection"]


class EvalSection(Section):
    """Held-out evaluation, with the sampling settings of `[rollout]`; before the first batch and after the last at least."""

    samples: int = Field(default=256, ge=1)
    """Held-out prompts, one response each."""

    interval: int = Field(default=10, ge=0)
    """Batches between two evaluations. 0: only at the start and at the end."""
