"""The background writer: bounded, ordered, and never silent."""

from __future__ import annotations

import threading
import time
from functools import partial
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
        assert writer.num_pending == 1
        threading.Timer(0.1, gate.set).start()
        start = time.monotonic()
        writer.submit(lambda: None, path="b")
        assert time.monotonic() - start > 0.05


def test_a_failed_job_raises_at_the_next_submit_with_its_path_and_the_new_job_is_not_taken() -> None:
    ran = []
    with BackgroundWriter() as writer:
        writer.submit(lambda: 1 / 0, path="bad.parquet")
        with pytest.raises(WriteError, match=r"dump bad\.parquet was not written: division by zero"):
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
    gate = threading.Event()
    with BackgroundWriter() as writer:
        writer.submit(gate.wait, path="a")
        writer.check()
        gate.set()


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


@pytest.mark.parametrize("options", [{"max_pending": 0}, {"deadline_seconds": 0}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(WriteError, match="needs max_pending >= 1"):
        BackgroundWriter(**options)
