"""`[dump]`: what is written for every batch."""

from __future__ import annotations

from pathlib import Path

from rl_runtime.config.base import Section

__all__ = ["DumpSection", "in_run_folder"]


class DumpSection(Section):
    """Files of what was generated and of what was trained on. A template holds `{batch_id}`."""

    rollout: str = "{run_dir}/dumps/rollout_{batch_id}.parquet"
    """Template of the rollout dump. Empty: none is written."""

    train: str = "{run_dir}/dumps/train_{batch_id}.parquet"
    """Template of the train dump. Empty: none is written."""


def in_run_folder(template: str, run_dir: Path) -> str:
    """Put the run's folder in the place of `{run_dir}`; braces in the folder's own name become doubled, since they are no placeholders."""
    return template.replace("{run_dir}", str(run_dir).replace("{", "{{").replace("}", "}}"))
