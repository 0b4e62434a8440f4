"""The janitor removes what it was told when the last holder of the pipe is gone, not before."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SERVER = """
    import os, sys, time
    from pathlib import Path
    from rl_runtime.engine.janitor import start_janitor
    janitor = start_janitor(Path(sys.argv[1]))
    for path in sys.argv[2:]:
        janitor.remove_later(Path(path))
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


Family = tuple[subprocess.Popen[bytes], int, Path, Path]
"""(server, pid of its child, scratch folder, file that is to be removed)."""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    """A server with a forked child, a scratch folder and two files, of which one is not there."""
    scratch, told = tmp_path / "scratch", tmp_path / "told"
    (scratch / "deeper").mkdir(parents=True)
    (scratch / "deeper" / "socket").touch()
    told.touch()
    server = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER), scratch, told, tmp_path / "missing"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    child = int(server.stdout.readline())
    yield server, child, scratch, told
    for pid in (child, server.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    server.wait()
    server.stdout.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_is_removed_when_the_last_of_the_family_is_killed(family: Family) -> None:
    server, child, scratch, told = family
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    time.sleep(0.3)
    assert scratch.exists() and told.exists(), "its child still uses them"
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not scratch.exists() and not told.exists())


def test_a_signal_to_the_whole_group_does_not_reach_the_janitor(family: Family) -> None:
    server, _, scratch, told = family
    os.killpg(server.pid, signal.SIGKILL)
    wait_until(lambda: not scratch.exists() and not told.exists())
