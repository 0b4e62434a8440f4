"""Runs of the command line as a user starts them.

Each has a session of its own and is marked, so that no process of it can be overlooked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
NUM_BATCHES = 20
"""Enough to learn; the recipe itself has 50."""


@dataclass
class Run:
    """One started command."""

    process: subprocess.Popen[bytes]
    folder: Path
    output: Path
    marker: str

    def processes(self) -> dict[int, str]:
        """Everything alive that descends from the command, by pid, whatever parent it has now."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.marker.encode() in (entry / "environ").read_bytes():
                        found[int(entry.name)] = (
                            (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
                        )
                except OSError:
                    continue
        return found

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done within {seconds} s:\n{self.text()[-3000:]}")

    def wait_for(self, reached: Callable[[], bool], what: str, seconds: float) -> None:
        """Poll until `reached()` is true."""
        deadline = time.monotonic() + seconds
        while not reached():
            if self.process.poll() is not None:
                pytest.fail(
                    f"ended with {self.process.returncode} before: {what}\n{self.text()[-3000:]}"
                )
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds} s: {what}\n{self.text()[-3000:]}")
            time.sleep(0.1)

    def wait_until_nothing_is_left(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.1)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def end(self) -> None:
        for pid in [self.process.pid, *self.processes()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)


class Launcher:
    """Starts runs and ends whatever is left of them."""

    short = (
        "train.num_batches=2",
        "rollout.prompts_per_batch=16",
        "rollout.rollouts_per_prompt=4",
        "train.global_batch_size=32",
        "warm_start.steps=12",
        "warm_start.first_check=12",
        "warm_start.check_samples=32",
        "eval.samples=32",
    )
    """The quick start with small batches, from a model that has hardly been warmed up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[Run] = []

    def __call__(self, name: str, *overrides: str) -> Run:
        marker = f"RL_TEST_RUN={uuid.uuid4()}"
        variable, _, value = marker.partition("=")
        folder, output = self._folder / name, self._folder / f"{name}.out"
        command = [
            str(Path(sys.executable).with_name("rl-runtime")),
            "train",
            str(ROOT / "recipes" / "quickstart.toml"),
        ]
        settings = [
            argument
            for override in (f"run.dir={folder}", *overrides)
            for argument in ("--set", override)
        ]
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [*command, *settings],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, variable: value},
            )
        self._runs.append(Run(process, folder, output, marker))
        return self._runs[-1]

    def end_all(self) -> None:
        for run in self._runs:
            run.end()


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("runs"))
    try:
        yield launcher
    finally:
        launcher.end_all()


@pytest.fixture(scope="session")
def quick_start(launch: Launcher) -> Path:
    """The folder of the quick start, run once for all tests: as it is, but fewer batches."""
    run = launch("quickstart", f"train.num_batches={NUM_BATCHES}")
    code = run.wait(600)
    assert code == 0, run.text()[-4000:]
    run.wait_until_nothing_is_left(10)
    return run.folder
