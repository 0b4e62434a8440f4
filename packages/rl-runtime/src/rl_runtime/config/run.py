"""The run itself and what it leaves behind: `run`, `dump`, `eval`, `tracking`, `debug`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = [
    "DebugSection",
    "DumpSection",
    "EvalSection",
    "RunSection",
    "TrackingSection",
    "in_run_folder",
]


class RunSection(Section):
    """Where a run lives, its random start and its deadline."""

    dir: Path = Path("runs/quickstart")
    """Folder of everything the run writes. It must not exist yet."""

    rng: int = Field(default=0, ge=0)
    """Random start: initial weights, data draws and sampling all follow from it."""

    deadline_seconds: float = Field(default=3600.0, gt=0)
    """The run is ended, with an error, when it takes longer than this many seconds."""


class DumpSection(Section):
    """Files of what was generated and of what was trained on. A template holds `{batch_id}`."""

    rollout: str = "{run_dir}/dumps/rollout_{batch_id}.parquet"
    """Template of the rollout dump. Empty: none is written."""

    train: str = "{run_dir}/dumps/train_{batch_id}.parquet"
    """Template of the train dump. Empty: none is written."""


def in_run_folder(template: str, run_dir: Path) -> str:
    """Put the run's folder in the place of `{run_dir}`."""
    # Braces in the folder's own name are not placeholders, and doubled so that `format` keeps them.
    return template.replace("{run_dir}", str(run_dir).replace("{", "{{").replace("}", "}}"))


class EvalSection(Section):
    """Held-out evaluation, with the sampling settings of `[rollout]`.

    Before the first batch and after the last at least.
    """

    samples: int = Field(default=256, ge=1)
    """Held-out prompts, one response each."""

    interval: int = Field(default=10, ge=0)
    """Batches between two evaluations. 0: only at the start and at the end."""


class TrackingSection(Section):
    """Where metrics go, beside `metrics.jsonl` in the run folder, which is always written."""

    tensorboard: bool = True
    """Write TensorBoard files to the run folder's `tensorboard`."""

    report: bool = True
    """Write `report.html` at the end."""


class DebugSection(Section):
    """Half a loop at a time."""

    load_rollout_dump: str = ""
    """Rollout dump, or a template with `{batch_id}`, to train on. No engine is started."""

    rollout_only: bool = False
    """Generate and dump batches, train nothing."""
