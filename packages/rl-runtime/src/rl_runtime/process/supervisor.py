"""One more process that outlives a run, so that nothing else does.

A run that is killed cannot clean up. So the command forks before it has started or imported
anything large: the child does the work, the parent waits. When the child has ended, however it did,
the parent ends whatever is left of it; when the parent is killed, the kernel tells the child, which
then ends the run as after Ctrl-C.

Invariants: signals to the parent reach the child; the exit code is the child's; when the parent has
ended, no process of the run is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from rl_runtime.process.interrupts import SIGNALS, handle
from rl_runtime.process.process_tree import die_with_parent, no_process_left

__all__ = ["end_at_once", "go_on_supervised"]


def go_on_supervised(*, failed: int) -> bool:
    """Fork, and return in the child only.

    Args:
        failed: exit code of the parent where a signal killed the child.

    Returns:
        Whether there is a parent that cleans up; not where the system is not Linux.
    """
    if sys.platform != "linux":
        return False
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # No signal may come between the fork and the handler that sends it on.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with no_process_left():
        child = os.fork()
        if child == 0:
            die_with_parent(signal.SIGTERM, parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return True
        code = _exit_code_of(child, failed)
    return end_at_once(code)


def _exit_code_of(child: int, failed: int) -> int:
    def send_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    handle(send_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ended = status = 0
    while ended != child:
        # No deadline: a run ends at its own. Adopted orphans are reaped on the way.
        ended, status = os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    sys.stderr.write(
        f"error: the run (pid {child}) was killed by {signal.Signals(-code).name}; what it had"
        " started is stopped\n"
    )
    return failed


def end_at_once(code: int) -> NoReturn:
    """End this process without what libraries do at the end of one.

    Right for a process whose leftovers another one ends: native code that was interrupted while it
    started, Ray's for instance, aborts in its teardown, and the exit code would be the abort's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
