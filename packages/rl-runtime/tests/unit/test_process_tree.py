"""What a run started is gone after it, however it was started; what was there before stays."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from rl_runtime.process.process_tree import die_with_parent, no_process_left

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="orphans can be adopted on Linux only"
)

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
ORPHAN = (
    "import os, subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True,"
    " stdout=subprocess.DEVNULL).pid)"
)


def orphan() -> psutil.Process:
    """Start a process in a session of its own whose parent is gone."""
    return psutil.Process(
        int(subprocess.check_output([sys.executable, "-S", "-c", ORPHAN, *SLEEP]))
    )


def is_gone(process: psutil.Process) -> bool:
    deadline = time.monotonic() + 5
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_children_and_orphans_are_ended_and_older_ones_are_not() -> None:
    older = subprocess.Popen(SLEEP)
    try:
        with no_process_left():
            child, lost = subprocess.Popen(SLEEP), orphan()
            seen = psutil.Process(child.pid)
        assert is_gone(seen)
        assert is_gone(lost)
        child.wait(5)
        assert older.poll() is None
    finally:
        older.kill()
        older.wait()


def test_an_error_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), no_process_left():
        lost = orphan()
        raise ZeroDivisionError
    assert is_gone(lost)


def test_a_parent_that_is_dead_already_is_noticed() -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait(10)
    # 0: no signal is asked for, so that nothing becomes of this process.
    with pytest.raises(SystemExit, match=f"process {gone.pid}, which started this one, is dead"):
        die_with_parent(0, gone.pid)
    die_with_parent(0, os.getppid())
