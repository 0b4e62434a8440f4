"""The launcher of gloo ranks: results in order, failures with their rank, no process left."""

import math
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_metrics import MetricsError
from rl_metrics.selftest import processes
from rl_metrics.selftest.processes import RanksFailedError, run_gloo_ranks

pytestmark = pytest.mark.distributed


def test_results_come_in_rank_order() -> None:
    assert run_gloo_ranks(lambda rank, size: (rank, size), 3) == [(0, 3), (1, 3), (2, 3)]


def test_tensors_in_a_result_outlive_their_rank() -> None:
    results = run_gloo_ranks(
        lambda rank, _: [torch.full((100,), float(rank)), *(torch.arange(k) for k in range(60))], 3
    )
    assert [result[0][99].item() for result in results] == [0.0, 1.0, 2.0]
    assert all(
        torch.equal(tensor, torch.arange(k))
        for result in results
        for k, tensor in enumerate(result[1:])
    )


def test_a_result_that_does_not_pickle_is_reported() -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0 of 1: Traceback.*pickle"):
        run_gloo_ranks(lambda rank, _: lambda: rank, 1, deadline_seconds=20)


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    def work(rank: int, _: int) -> int:
        if rank == 1:
            raise KeyError("lost")
        return rank

    with pytest.raises(RanksFailedError, match=r"(?s)rank 1 of 2: Traceback.*KeyError: 'lost'"):
        run_gloo_ranks(work, 2, deadline_seconds=20)
    assert not multiprocessing.active_children()


def test_a_failing_rank_ends_the_collective_that_others_wait_in() -> None:
    def work(rank: int, _: int) -> None:
        if rank == 1:
            raise KeyError("lost")
        dist.all_reduce(torch.ones(3))

    started = time.monotonic()
    with pytest.raises(
        RanksFailedError, match=r"(?s)^rank 1 of 2: Traceback.*KeyError: 'lost'"
    ) as caught:
        run_gloo_ranks(work, 2, deadline_seconds=100)
    *_, last = str(caught.value).splitlines()
    assert last.startswith("rank 0 of 2 waited in a collective that this ended: RuntimeError: "), (
        "the consequence comes last, in one line"
    )
    assert str(caught.value).count("Traceback") == 1
    assert time.monotonic() - started < 60
    assert not multiprocessing.active_children()


def test_a_dead_rank_is_noticed() -> None:
    def work(rank: int, _: int) -> int:
        if rank == 0:
            os._exit(3)
        return rank

    with pytest.raises(RanksFailedError, match="rank 0 of 2: the process died without a result"):
        run_gloo_ranks(work, 2, deadline_seconds=20)
    assert not multiprocessing.active_children()


def test_a_deadline_ends_a_rank_that_hangs() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 of 2: no result after 3 s"):
        run_gloo_ranks(lambda rank, _: time.sleep(600 * rank), 2, deadline_seconds=3)
    assert time.monotonic() - started < 30
    assert not multiprocessing.active_children()


def test_ranks_that_fail_for_themselves_are_told_in_full_and_in_order_of_time() -> None:
    def work(rank: int, _: int) -> None:
        time.sleep(0.4 * (2 - rank))
        raise KeyError(f"of rank {rank}")

    with pytest.raises(
        RanksFailedError,
        match=(
            r"(?s)^rank 2 of 3: Traceback.*rank 1 of 3: Traceback.*rank 0 of 3: Traceback.*of"
            r" rank 0"
        ),
    ):
        run_gloo_ranks(work, 3, deadline_seconds=30)


def test_a_result_of_many_tensors_needs_no_file_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 40, hard))
    try:
        (result,) = run_gloo_ranks(
            lambda rank, _: [torch.full((3,), float(k)) for k in range(500)], 1
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [tensor[0].item() for tensor in result] == list(range(500))


@pytest.mark.parametrize(
    ("size", "deadline", "message"),
    [
        (0, 1.0, "size is 0"),
        (1.5, 1.0, "size is 1.5"),
        (1, 0.0, "deadline_seconds is 0"),
        (1, math.inf, "deadline_seconds is inf"),
    ],
)
def test_a_size_or_deadline_that_is_none_is_refused(
    size: Any, deadline: float, message: str
) -> None:
    with pytest.raises(MetricsError, match=message):
        run_gloo_ranks(lambda rank, _: rank, size, deadline_seconds=deadline)


def test_a_ranks_own_work_in_this_process(tmp_path: Path) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    threads = torch.get_num_threads()
    processes._rank_main(
        lambda rank, size: torch.tensor([rank, size]), 0, 1, tmp_path, 30.0, sender
    )
    torch.set_num_threads(threads)
    outcome = processes._receive(receiver)
    assert outcome.failure is None
    assert isinstance(outcome.result, torch.Tensor)
    assert outcome.result.tolist() == [0, 1]


NO_GROUP: Any = "no group"


def test_a_ranks_own_failure_in_this_process(tmp_path: Path) -> None:
    def broken(rank: int, size: int) -> None:
        dist.all_reduce(torch.ones(1), group=NO_GROUP)

    receiver, sender = multiprocessing.Pipe(duplex=False)
    threads = torch.get_num_threads()
    processes._rank_main(broken, 0, 1, tmp_path, 30.0, sender)
    torch.set_num_threads(threads)
    outcome = processes._receive(receiver)
    assert outcome.failure is not None
    assert outcome.failure.startswith("Traceback")
    assert outcome.last_line.split(":")[0] in outcome.failure


@pytest.mark.parametrize("seconds", [1e300, 1e7, math.inf])
def test_a_deadline_that_no_system_call_can_count_is_refused(seconds: float) -> None:
    with pytest.raises(MetricsError, match="deadline_seconds is"):
        run_gloo_ranks(lambda rank, _: rank, 1, deadline_seconds=seconds)
