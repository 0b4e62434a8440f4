"""Run a function on several ranks of a gloo process group on this machine, with a deadline.

Layer: processes only; used by the self-test and by tests. Invariants: no process outlives the call; every wait has a deadline; a rank's failure
is reported with its rank and traceback.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from rl_metrics.errors import MetricsError

__all__ = ["RanksFailedError", "run_gloo_ranks"]

Result = TypeVar("Result")


class RanksFailedError(MetricsError, RuntimeError):
    """Some ranks raised, died or missed the deadline; the message holds their tracebacks."""


def run_gloo_ranks(function: Callable[[int, int], Result], size: int, *, deadline_seconds: float = 60.0) -> list[Result]:
    """Call ``function(rank, size)`` in ``size`` processes that form torch's default process group over gloo.

    Processes are forked, so that torch is imported once, and use one thread each.

    Args:
        function: called in each process; its result must pickle, and tensors in it are copied. With the fork start method it may be a closure.
        size: number of ranks, at least 1.
        deadline_seconds: after this long ranks still running are killed.

    Returns:
        The results in rank order.

    Raises:
        RanksFailedError: when a rank raises, dies, or the deadline passes; all ranks have ended by then.
    """
    context = multiprocessing.get_context("fork")
    end = time.monotonic() + deadline_seconds
    outcomes: dict[int, tuple[bool, object]] = {}
    with tempfile.TemporaryDirectory(prefix="rl-metrics-gloo-") as folder:
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(function, rank, size, Path(folder), deadline_seconds, sender), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns that a multi-threaded parent may deadlock a fork; the children touch none of its threads' locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            pipes[receiver] = rank
            processes.append(process)
        try:
            while pipes and time.monotonic() < end:
                for ready in wait(list(pipes), timeout=max(end - time.monotonic(), 0.0)):
                    if isinstance(ready, Connection):
                        outcomes[pipes.pop(ready)] = _receive(ready)
        finally:
            for process in processes:
                process.join(timeout=5.0 if not pipes else 0.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    return _results(outcomes, size, deadline_seconds)


def _receive(connection: Connection) -> tuple[bool, object]:
    """Return one rank's outcome; a closed pipe means that it died."""
    try:
        outcome: tuple[bool, object] = pickle.loads(connection.recv_bytes())  # noqa: S301 - written by our own child
    except EOFError:
        return False, "the process died without a result"
    finally:
        connection.close()
    return outcome


def _results(outcomes: dict[int, tuple[bool, object]], size: int, deadline_seconds: float) -> list[Result]:
    """Return the results, or raise for the ranks that have none."""
    late = (False, f"no result after {deadline_seconds:g} s")
    failed = [f"rank {rank} of {size}: {outcomes.get(rank, late)[1]}" for rank in range(size) if not outcomes.get(rank, late)[0]]
    if failed:
        raise RanksFailedError("\n".join(failed))
    return [outcomes[rank][1] for rank in range(size)]  # type: ignore[misc]


def _rank_main(
    function: Callable[[int, int], Result], rank: int, size: int, folder: Path, deadline_seconds: float, sender: Connection
) -> None:
    """Join the group, run the function, send back what came of it."""
    torch.set_num_threads(1)
    succeeded = False
    try:
        timeout = timedelta(seconds=deadline_seconds)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout)
        # Plain pickle copies tensors into the message. The pipe's own would share their memory, which ends with this process.
        outcome = pickle.dumps((True, function(rank, size)))
        succeeded = True
    except BaseException:  # whatever ended this rank is the parent's to report
        outcome = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(outcome)
    sender.close()
    if succeeded:
        # Leave together, so that no rank closes its connections under another's collective. A rank that failed leaves at once, which ends
        # the collectives that the others wait in; here it makes the barrier fail, and the failure has been reported by that rank.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
