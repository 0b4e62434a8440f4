"""A process and its descendants: what dies with its parent, and what must not be left behind.

Ray stops its daemons but not always what they started: its agents outlive an interrupted start, or
a killed driver, by a minute and more. On Linux a process can adopt those of its descendants that
lose their parent, and so finds all of them at the end.

Invariants: processes that were there before a block are not touched; after it nothing that was
started in it is alive; `die_with_parent` works also where the parent had ended before the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Iterator

import psutil

__all__ = ["die_with_parent", "no_process_left"]

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal that comes when the thread that started this process ends."""
_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h: orphans among the descendants become children of this process, not init's."""

_GRACE_SECONDS = 1.0
"""For processes that are ending already."""
_KILL_SECONDS = 5.0
"""For processes that were killed: one that takes longer hangs in the kernel."""


def die_with_parent(signal_number: int, parent: int) -> None:
    """Ask the kernel for a signal when the thread that started this process ends.

    Where the kernel is not Linux, only that the parent is alive is checked.

    Args:
        signal_number: what the kernel sends.
        parent: the parent's process id, as the parent itself told it.

    Raises:
        SystemExit: the parent is dead already, and the kernel would send no signal.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number, "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        raise SystemExit(f"process {parent}, which started this one, is dead")


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """End every descendant that was started in a `with` block and is still there at its end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")
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
                _log.error(
                    "processes %s are still there %g s after they were killed",
                    [process.pid for process in stubborn],
                    _KILL_SECONDS,
                )
                break
            # What the killed ones had started is ours now.
            alive = _started_since(before)


def _started_since(before: set[psutil.Process]) -> list[psutil.Process]:
    return list(set(psutil.Process().children(recursive=True)) - before)


def _prctl(option: int, value: int, name: str) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        _log.warning(
            "prctl(%s) was refused (errno %d): processes of this run may outlive it",
            name,
            ctypes.get_errno(),
        )
