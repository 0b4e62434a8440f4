"""Leave no process behind. Layer: cluster; no Ray.

Ray stops its daemons but not always what they started: its agents outlive an interrupted start by a minute. On Linux this process therefore adopts
whatever loses its parent, and so finds all of it again at the end.

Invariants: processes that were there before a block are not touched; after it nothing that was started in it is alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from collections.abc import Iterator

import psutil

__all__ = ["no_process_left"]

_log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h: orphans among the descendants become children of this process instead of init's."""

_GRACE_SECONDS = 1.0
"""For processes that are ending already."""
_KILL_SECONDS = 5.0


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """End every descendant of this process that was started in a `with` block and is still there at its end."""
    _adopt_orphans()
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        _, alive = psutil.wait_procs(_started_since(before), timeout=_GRACE_SECONDS)
        while alive:
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            _, stubborn = psutil.wait_procs(alive, timeout=_KILL_SECONDS)
            if stubborn:
                _log.error("processes %s are still there %g s after they were killed", [process.pid for process in stubborn], _KILL_SECONDS)
                break
            # What the killed ones had started is ours now.
            alive = _started_since(before)


def _started_since(before: set[psutil.Process]) -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if process not in before]


def _adopt_orphans() -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        _log.warning("prctl(PR_SET_CHILD_SUBREAPER) was refused (errno %d): orphans of this run may outlive it", ctypes.get_errno())
