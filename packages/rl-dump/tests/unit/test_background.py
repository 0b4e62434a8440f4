"""The background writer: bounded, ordered, and never silent."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rl_dump import BackgroundWriter, WriteError


def test_jobs_run_in_order_in_one_thread() -> None:
    done, threads = [], set()

    def job(number: int) -> None:
        threads.add(threading.current_thread().name)
        done.append(number)

    with BackgroundWriter(max_pending=2) as writer:
        for number in range(20):
            writer.submit(partial(job, number), path=f"{number}.parquet")
    assert done == list(range(20))
    assert len(threads) == 1


def test_submit_returns_before_the_job_is_done_and_waits_when_full() -> None:
    gate = threading.Event()
    with BackgroundWriter(max_pending=1, deadline_seconds=30) as writer:
        writer.submit(gate.wait, path="a")
        assert writer._count() == 1
        threading.Timer(0.1, gate.set).start()
        start = time.monotonic()
        writer.submit(lambda: None, path="b")
        assert time.monotonic() - start > 0.05


def test_a_failed_job_raises_at_the_next_submit_with_its_path_and_the_new_job_is_not_taken() -> (
    None
):
    ran = []
    with BackgroundWriter() as writer:
        writer.submit(lambda: 1 / 0, path="bad.parquet")
        with pytest.raises(
            WriteError, match=r"dump bad\.parquet was not written: division by zero"
        ):
            writer.submit(lambda: ran.append(1), path="next.parquet")
        assert ran == []
        writer.submit(lambda: ran.append(2), path="next.parquet")
    assert ran == [2]


def test_a_failed_job_raises_at_close_and_only_once() -> None:
    writer = BackgroundWriter()
    writer.submit(lambda: 1 / 0, path="bad.parquet")
    with pytest.raises(WriteError, match="bad"):
        writer.close()
    writer.close()


def test_check_never_waits() -> None:
    gate, finished = threading.Event(), []

    def job() -> None:
        gate.wait(10)
        finished.append("a")

    with BackgroundWriter() as writer:
        writer.submit(job, path="a")
        writer.check()
        assert finished == []
        gate.set()
    assert finished == ["a"]


def test_a_stuck_job_meets_the_deadline() -> None:
    gate = threading.Event()
    writer = BackgroundWriter(deadline_seconds=0.05)
    writer.submit(gate.wait, path="stuck.parquet")
    with pytest.raises(WriteError, match=r"stuck\.parquet is not written after 0\.05 s"):
        writer.submit(lambda: None, path="next")
    with pytest.raises(WriteError, match="stuck"):
        writer.close()
    gate.set()


def test_an_exception_in_the_block_is_not_hidden_by_a_failed_job() -> None:
    with pytest.raises(KeyError, match="mine"), BackgroundWriter() as writer:
        writer.submit(lambda: 1 / 0, path="bad")
        raise KeyError("mine")


def test_every_failure_is_told_at_once_and_the_jobs_behind_it_still_run() -> None:
    gate, ran = threading.Event(), []

    def fail(text: str) -> None:
        gate.wait(30)
        raise OSError(text)

    writer = BackgroundWriter(max_pending=4)
    writer.submit(partial(fail, "one"), path="a.parquet")
    writer.submit(lambda: ran.append("b"), path="b.parquet")
    writer.submit(partial(fail, "two"), path="c.parquet")
    writer.submit(lambda: ran.append("d"), path="d.parquet")
    gate.set()
    with pytest.raises(
        WriteError,
        match=r"dump a\.parquet was not written: one; dump c\.parquet was not written: two",
    ) as told:
        writer.close()
    assert isinstance(told.value.__cause__, OSError)
    assert ran == ["b", "d"]
    writer.check()


def test_close_names_the_stuck_job_and_those_behind_it() -> None:
    gate, ran = threading.Event(), []
    writer = BackgroundWriter(max_pending=3, deadline_seconds=0.05)
    writer.submit(gate.wait, path="a.parquet")
    writer.submit(lambda: ran.append("b"), path="b.parquet")
    with pytest.raises(
        WriteError,
        match=r"a\.parquet is not written after 0\.05 s.*; dump b\.parquet was not written",
    ):
        writer.close()
    gate.set()
    writer.close()
    assert writer._count() in {0, 1}
    assert ran == []


@pytest.mark.parametrize("wrong", [SystemExit(3), KeyboardInterrupt(), CancelledError()])
def test_whatever_ends_a_job_is_a_write_error(wrong: BaseException) -> None:
    def job() -> None:
        raise wrong

    writer = BackgroundWriter()
    writer.submit(job, path="a.parquet")
    with pytest.raises(WriteError, match=r"dump a\.parquet was not written: ."):
        writer.close()


def test_a_closed_writer_takes_no_job() -> None:
    writer = BackgroundWriter()
    writer.close()
    with pytest.raises(
        WriteError, match=r"dump a\.parquet was not written: this BackgroundWriter is closed"
    ):
        writer.submit(lambda: None, path="a.parquet")


def test_a_stuck_job_does_not_hold_the_end_of_the_process() -> None:
    code = """
import threading
from rl_dump import BackgroundWriter, WriteError
writer = BackgroundWriter(deadline_seconds=0.1)
writer.submit(threading.Event().wait, path="stuck.parquet")
{close}
"""
    close = "try:\n    writer.close()\nexcept WriteError as error:\n    print(error)"
    for end, stream in ((close, "stdout"), ("", "stderr")):
        found = subprocess.run(
            [sys.executable, "-c", code.format(close=end)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "stuck.parquet is not written after 0.1 s" in getattr(found, stream)


def test_a_process_that_ends_without_close_still_writes(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib, rl_dump\nw = rl_dump.BackgroundWriter()\nw.submit(lambda:"
        " (time.sleep(0.3), pathlib.Path(sys.argv[1]).write_text('x')), path='x')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], timeout=60, check=True)
    assert (tmp_path / "x").read_text() == "x"


def test_a_failed_job_behind_an_exception_in_the_block_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(KeyError), BackgroundWriter() as writer:
        writer.submit(lambda: 1 / 0, path="bad.parquet")
        raise KeyError
    assert "dump bad.parquet was not written" in caplog.text


@pytest.mark.parametrize("options", [{"max_pending": 0}, {"deadline_seconds": 0}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(WriteError, match="needs max_pending >= 1"):
        BackgroundWriter(**options)
