"""Whoever is killed, the command or its child: nothing is left, and the exit code says why."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="orphans can be adopted on Linux only"
)

RUN = """
import os, subprocess, sys, time
from rl_runtime.process.supervisor import go_on_supervised
go_on_supervised(failed=1)
lost = subprocess.Popen(
    [sys.executable, "-S", "-c", "import time; time.sleep(60)"],
    start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
print(os.getpid(), lost.pid, flush=True)
try:
    {work}
except KeyboardInterrupt:
    sys.exit(130)
"""


class Supervised:
    def __init__(self, work: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN.format(work=work)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        child, lost = self.next_line().split()
        self.child, self.lost = psutil.Process(int(child)), psutil.Process(int(lost))

    def next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> int:
        self.output, self.errors = self.process.communicate(timeout=30)
        return self.process.returncode

    def is_gone(self) -> bool:
        deadline = time.monotonic() + 10
        while any(
            process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            for process in (self.child, self.lost)
        ):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def test_the_exit_code_is_the_childs_and_leftovers_are_ended() -> None:
    run = Supervised("sys.exit(7)")
    assert run.end() == 7
    assert run.is_gone()


def test_a_killed_child_is_told_and_leaves_nothing() -> None:
    run = Supervised("time.sleep(60)")
    run.child.kill()
    assert run.end() == 1
    assert "killed by SIGKILL" in run.errors
    assert run.is_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signals_reach_the_child(number: signal.Signals) -> None:
    run = Supervised(
        "from rl_runtime.process.interrupts import ended_by_signals\n    with ended_by_signals():"
        " print('ready', flush=True); time.sleep(60)"
    )
    assert run.next_line() == "ready\n"
    os.kill(run.process.pid, number)
    assert run.end() == 130
    assert run.is_gone()


def test_a_killed_parent_ends_the_child() -> None:
    run = Supervised("time.sleep(60)")
    run.process.kill()
    run.end()
    psutil.wait_procs([run.child], timeout=10)
    assert not run.child.is_running()
    run.lost.kill()
