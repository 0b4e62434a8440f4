"""The one place through which every metric of a run leaves.

Invariants: `metrics.jsonl` holds one line per optimizer step and one per evaluation, each complete
when it is written; a metric without data is left out, never written as 0; what is not finite is
written as null in the file and named in a warning.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rl_runtime.tracking.event_files import EventFile

__all__ = ["Tracker", "read_metrics"]

_log = logging.getLogger(__name__)


class Tracker(AbstractContextManager["Tracker"]):
    """The writer of `metrics.jsonl` and, if asked, of TensorBoard files."""

    def __init__(self, run_dir: Path, *, tensorboard: bool) -> None:
        """Open the files in the run's folder."""
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = EventFile(run_dir / "tensorboard") if tensorboard else None

    def log(self, *, batch: int, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write one line.

        Args:
            batch: rollout batch; for an evaluation, the number of batches trained before it.
            step: optimizer steps since the first batch.
            metrics: values by name; None = no data, left out.
        """
        values = {name: float(value) for name, value in metrics.items() if value is not None}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            _log.warning(
                "batch %d, step %d: not finite: %s",
                batch,
                step,
                sorted(values.keys() - finite.keys()),
            )
        line = {"batch": batch, "step": step, **{name: finite.get(name) for name in values}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._events is not None:
            self._events.add_scalars(step, finite)

    def __exit__(self, *_error: object) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's `metrics.jsonl`, without a last one that a crash cut short."""
    lines = []
    for text in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            _log.warning("%s: a line is not complete and is left out", run_dir / "metrics.jsonl")
    return lines
