"""However a run ends, it says why, with an exit code, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from rl_dump import open_dump

if TYPE_CHECKING:
    from e2e.conftest import Launcher, Run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LONG = ("train.num_batches=500", "warm_start.steps=2", "warm_start.first_check=2")


def in_batches(run: Run) -> bool:
    metrics = run.folder / "metrics.jsonl"
    return metrics.is_file() and '"train/loss"' in metrics.read_text()


def assert_ended(run: Run, *, codes: set[int], mentions: str) -> None:
    started = time.monotonic()
    assert run.wait(30) in codes, run.text()[-2000:]
    run.wait_until_nothing_is_left(30 - (time.monotonic() - started))
    assert mentions in run.text()
    assert "Traceback" not in run.text()


def test_a_killed_server_ends_the_run(launch: Launcher) -> None:
    run = launch("killed", *launch.short, *LONG)
    run.wait_for(lambda: in_batches(run), "a trained batch", 300)
    server = next(
        pid for pid, command in run.processes().items() if "rl_runtime.engine.server" in command
    )
    os.kill(server, signal.SIGKILL)
    assert_ended(run, codes={1}, mentions="engine 0")


def test_control_c_ends_the_run(launch: Launcher) -> None:
    run = launch("interrupted", *launch.short, *LONG)
    run.wait_for(lambda: in_batches(run), "a trained batch", 300)
    # A terminal sends the signal to the whole foreground process group.
    os.killpg(run.process.pid, signal.SIGINT)
    assert_ended(run, codes={130}, mentions="interrupted")


def test_a_killed_trainer_ends_the_run(launch: Launcher) -> None:
    run = launch("trainer", *launch.short, *LONG)
    run.wait_for(lambda: in_batches(run), "a trained batch", 300)
    trainer = next(
        child
        for child in psutil.Process(run.process.pid).children(recursive=True)
        if "TrainerActor" in " ".join(child.cmdline())
    )
    trainer.kill()
    assert_ended(run, codes={1}, mentions="trainer rank")


def test_a_killed_driver_leaves_nothing(launch: Launcher) -> None:
    run = launch("driver", *launch.short, *LONG)
    run.wait_for(lambda: in_batches(run), "a trained batch", 300)
    command = psutil.Process(run.process.pid)
    family = command.children(recursive=True)
    (driver,) = command.children()
    driver.kill()
    assert_ended(run, codes={1}, mentions="killed by SIGKILL")
    # Ray's workers write their titles over their environment, by which `run` finds processes.
    assert not [
        process
        for process in family
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    # Whatever was being written: a dump under its name is whole.
    for path in sorted((run.folder / "dumps").glob("*.parquet")):
        with open_dump(path) as dump:
            assert dump.verify() == [], path
