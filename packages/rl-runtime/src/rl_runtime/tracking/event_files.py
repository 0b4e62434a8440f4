"""TensorBoard files without torch or TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["EventFile"]


class EventFile:
    """Scalars over steps, in the format that TensorBoard reads."""

    def __init__(self, folder: Path) -> None:
        """Open a new event file in a folder, which is created."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append one value per tag at a step."""
        summary = self._summary(
            value=[
                self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
            ]
        )
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Write out and close the file."""
        self._writer.close()
