"""`[debug]`: half a loop at a time."""

from __future__ import annotations

from rl_runtime.config.base import Section

__all__ = ["DebugSection"]


class DebugSection(Section):
    """Half a loop at a time."""

    load_rollout_dump: str = ""
    """Rollout dump, or a template with `{batch_id}`, to train on. No engine is started."""

    rollout_only: bool = False
    """Generate and dump batches, train nothing."""
