"""The launcher of gloo ranks: results in order, failures with their rank, no process left behind."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from rl_metrics.torch.processes import RanksFailedError, run_gloo_ranks

pytestmark = pytest.mark.distributed


def test_results_come_in_rank_order() -> None:
    assert run_gloo_ranks(lambda rank, size: (rank, size), 3) == [(0, 3), (1, 3), (2, 3)]


def test_tensors_in_a_result_outlive_their_rank() -> None:
    results = run_gloo_ranks(lambda rank, _: [torch.full((100,), float(rank)), *(torch.arange(k) for k in range(60))], 3)
    assert [result[0][99].item() for result in results] == [0.0, 1.0, 2.0]
    assert all(torch.equal(tensor, torch.arange(k)) for result in results for k, tensor in enumerate(result[1:]))


def test_a_result_that_does_not_pickle_is_reported() -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0 of 1: Traceback.*pickle"):
        run_gloo_ranks(lambda rank, _: lambda: rank, 1, deadline_seconds=20)


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    def work(rank: int, _):
        if rank == 1:
            raise KeyError("lost")
        return rank

    with pytest.raises(RanksFailedError, match=r"(?s)rank 1 of 2: Traceback.*KeyError: 'lost'"):
        run_gloo_ranks(work, 2, deadline_seconds=20)
    assert not multiprocessing.active_children()


def test_a_failing_rank_ends_the_collective_that_others_wait_in() -> None:
    def work(rank: int, _) -> None:
        if rank == 1:
            raise KeyError("lost")
        dist.all_reduce(torch.ones(3))

    started = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0 of 2: .*rank 1 of 2: .*KeyError: 'lost'"):
        run_gloo_ranks(work, 2, deadline_seconds=100)
    assert time.monotonic() - started < 60
    assert not multiprocessing.active_children()


def test_a_dead_rank_is_noticed() -> None:
    def work(rank: int, _):
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
