"""Run one function in several real processes joined by gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_SECONDS = 60.0


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> list[Any]:
    """Return `function(rank, *args)` of every rank.

    An exception of a rank is raised here with its traceback.

    Processes are forked after torch is loaded, so that each costs milliseconds and not the import.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_main,
                args=(function, rank, world_size, folder, pipes[rank][1], args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        with warnings.catch_warnings():
            # Python warns of fork in a process with threads; the children touch none of the
            # parent's.
            warnings.simplefilter("ignore", DeprecationWarning)
            for process in processes:
                process.start()
        try:
            results = [
                _receive(rank, pipe, deadline_seconds) for rank, (pipe, _) in enumerate(pipes)
            ]
        finally:
            for process in processes:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    failures = [
        f"rank {rank}:\n{result[1]}" for rank, result in enumerate(results) if result[0] == "error"
    ]
    if failures:
        raise AssertionError("\n".join(failures))
    return [result[1] for result in results]


def _receive(rank: int, pipe: Any, deadline_seconds: float) -> tuple[str, Any]:
    if not pipe.poll(deadline_seconds):
        return "error", f"no answer within {deadline_seconds:g} s"
    try:
        answer: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "error", "the process ended without an answer"
    return answer


def _main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    pipe: Any,
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        answer = ("ok", function(rank, *args))
    except BaseException:  # whatever it is, the parent shall see it
        answer = ("error", traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)
