"""`[tracking]`: where metrics go."""

from __future__ import annotations

from rl_runtime.config.base import Section

__all__ = ["TrackingSection"]


class TrackingSection(Section):
    """Where metrics go, beside `metrics.jsonl` in the run folder, which is always written."""

    tensorboard: bool = True
    """Write TensorBoard files to the run folder's `tensorboard`."""

    report: bool = True
    """Write `report.html` at the end."""
