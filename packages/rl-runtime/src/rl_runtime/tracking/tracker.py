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
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl_runtime.tracking.event_files import EventFile

__all__ = ["Tracker", "read_metrics"]

_log = logging.getLogger(__name__)


class Tracker:
    """Writes metrics to `metrics.jsonl` and, if asked, to TensorBoard files; keeps all lines for the report."""

    def __init__(self, run_dir: Path, *, tensorboard: bool) -> None:
        """Open the files in the run's folder."""
        self.lines: list[dict[str, Any]] = []
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
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._events is not None:
            self._events.add_scalars(step, finite)

    def __enter__(self) -> Self:
        """Give the tracker itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read all complete lines of a run's `metrics.jsonl`; a last line that a crash cut short is left out."""
    lines = []
    for text in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            _log.warning("%s: a line is not complete and is left out", run_dir / "metrics.jsonl")
    return lines
