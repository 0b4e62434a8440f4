"""A small process that removes what a server leaves behind, however it ends.

SGLang leaves socket files and a shared-memory file when it is killed, and killed it is: by
`EngineProcess.stop`, or by the kernel when its parent dies, when nobody else is left to clean up.
The janitor holds the reading end of a pipe whose writing end lives in the server's processes; when
it closes, they are gone.

Invariants: the janitor outlives the server by a moment and nothing else; it removes only its
server's scratch folder and the files that it was told.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

__all__ = ["Janitor", "start_janitor"]


class Janitor:
    """The server's end of the pipe."""

    def __init__(self, pipe: int) -> None:
        """Take the writing end."""
        self._pipe = pipe

    def remove_later(self, path: Path) -> None:
        """Have a file removed when the server is gone."""
        os.write(self._pipe, f"{path}\n".encode())


def start_janitor(scratch: Path | None) -> Janitor:
    """Fork the janitor; to be called while the process is small and has one thread.

    Args:
        scratch: folder to be removed with all that is in it; None: no folder.
    """
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)
        # Forked children of the server hold the pipe too, so that it closes with the last of them.
        return Janitor(writing)
    try:
        # Out of the server's session: neither a signal to its group nor a terminal's reaches the
        # janitor.
        os.setsid()
        os.close(writing)
        _clean_up(reading, scratch)
    finally:
        os._exit(0)


def _clean_up(pipe: int, scratch: Path | None) -> None:
    """Wait until the pipe closes, then remove."""
    with os.fdopen(pipe, encoding="utf-8") as told:
        paths = [Path(line.rstrip("\n")) for line in told]
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
