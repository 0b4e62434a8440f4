"""Fixtures that several tiers use: random rows of every status, and gloo processes."""

import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from rl_topp import NucleusSet

# So that `stubs.near_ties` is found from every tier.
sys.path.insert(0, str(Path(__file__).parent))

DEADLINE_SECONDS = 90.0

# A busy machine is not the code's fault: laws have no time limit of their own, the test run has
# one.
settings.register_profile("rl-topp", deadline=None, max_examples=100)
settings.register_profile("small", deadline=None, max_examples=20)
settings.load_profile("rl-topp")


def _random_rows(
    rng: np.random.Generator,
    num_rows: int,
    vocab_size: int,
    *,
    statuses: tuple[int, ...] = (0, 1, 2, 3),
    largest: int | None = None,
) -> NucleusSet:
    status = rng.choice(statuses, num_rows)
    sizes = np.where(
        (status == 0) | (status == 3), rng.integers(1, (largest or vocab_size) + 1, num_rows), 0
    )
    ids = [rng.choice(vocab_size, size, replace=False) for size in sizes]
    flat = np.concatenate(ids) if ids else np.zeros(0, np.int64)
    return NucleusSet(
        ids=flat.astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        status=status,
        vocab_size=vocab_size,
    )


@pytest.fixture
def random_rows() -> Callable[..., NucleusSet]:
    """Draw rows of random status; targets may lie outside their sets, so forcing is tested too."""
    return _random_rows


def _enter_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    arguments: tuple[Any, ...],
    results: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        results.put((rank, function(rank, world_size, *arguments), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """Run `function(rank, world_size, *arguments)` in forked gloo processes, one per rank."""
    pytest.importorskip("torch")

    def run(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        store = str(tmp_path / f"store-{world_size}-{function.__name__}")
        processes = [
            context.Process(
                target=_enter_rank, args=(function, rank, world_size, store, arguments, results)
            )
            for rank in range(world_size)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # fork with torch's idle threads: the children start none
            for process in processes:
                process.start()
        try:
            collected: dict[int, Any] = {}
            for _ in processes:
                rank, value, failure = results.get(timeout=DEADLINE_SECONDS)
                assert failure is None, f"rank {rank}:\n{failure}"
                collected[rank] = value
            for process in processes:
                process.join(timeout=DEADLINE_SECONDS)
            return [collected[rank] for rank in range(world_size)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()

    return run
