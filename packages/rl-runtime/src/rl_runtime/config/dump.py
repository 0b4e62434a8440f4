"""`[dump]`: what is written for every batch. Layer: config."""

from __future__ import annotations

from rl_runtime.config.base import Section

__all__ = ["DumpSection"]


class DumpSection(Section):
    """Files of what was generated and of what was trained on. A template holds `{batch_id}`."""

    rollout: str = "{run_dir}/dumps/rollout_{batch_id}.parquet"
    """Template of the rollout dump. Empty: none is written."""

    train: str = "{run_dir}/dumps/train_{batch_id}.parquet"
    """Template of the train dump. Empty: none is written."""
