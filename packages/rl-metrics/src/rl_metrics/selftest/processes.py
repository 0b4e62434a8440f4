"""Run a function on several ranks of a gloo process group on this machine, with a deadline.

Invariants: no process outlives the call; every wait has a deadline; a rank's failure
is reported with its rank and traceback, causes before the failures they brought about in other
ranks; a result travels as bytes, so that a tensor in it needs neither shared memory nor a file
descriptor.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from rl_metrics.arguments import count, finite_number
from rl_metrics.errors import MetricsError

__all__ = ["RanksFailedError", "run_gloo_ranks"]

Result = TypeVar("Result")

_LONGEST_DEADLINE = 1e6
"""Seconds; what the system calls that wait can count."""


class RanksFailedError(MetricsError, RuntimeError):
    """Ranks that raised, died or missed the deadline: all tracebacks, the cause first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What came of one rank."""

    result: object = None
    """What the function returned."""

    failure: str | None = None
    """Traceback, or why there is none; None where the function returned."""

    last_line: str = ""
    """The failure in one line."""

    in_collective: bool = False
    """Whether the failure came out of torch.distributed, as in ranks that waited for another."""

    failed_at: float = -math.inf
    """When, on the clock that all processes of the machine share; seconds."""


def run_gloo_ranks(
    function: Callable[[int, int], Result], size: int, *, deadline_seconds: float = 60.0
) -> list[Result]:
    """Call `function(rank, size)` in `size` processes of one gloo process group.

    It is torch's default group. Processes are forked, so that torch is imported once, and use one
    thread each.

    Args:
        function: called in each process; its result must pickle, and tensors in it are copied. With
            the fork start method it may be a closure.
        size: number of ranks, at least 1.
        deadline_seconds: after this many seconds ranks still running are killed; above 0, at most
            1e6.

    Returns:
        The results in rank order.

    Raises:
        MetricsError: for a size or a deadline outside its range.
        RanksFailedError: when a rank raises, dies, or the deadline passes; all ranks have ended by
            then.
    """
    size = count(size, "size")
    deadline_seconds = finite_number(deadline_seconds, "deadline_seconds", above=0.0)
    if deadline_seconds > _LONGEST_DEADLINE:
        raise MetricsError(
            f"deadline_seconds is {deadline_seconds:g}; give at most {_LONGEST_DEADLINE:g}, which"
            " is eleven days"
        )
    context = multiprocessing.get_context("fork")
    end = time.monotonic() + deadline_seconds
    outcomes: dict[int, _Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="rl-metrics-gloo-") as folder:
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(function, rank, size, Path(folder), deadline_seconds, sender),
                daemon=True,
            )
            with warnings.catch_warnings():
                # Python 3.12 warns that a multi-threaded parent may deadlock a fork; the children
                # touch none of its threads' locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            pipes[receiver] = rank
            processes.append(process)
        try:
            while pipes and time.monotonic() < end:
                for ready in wait(list(pipes), timeout=max(end - time.monotonic(), 0.0)):
                    pipe = cast("Connection", ready)
                    outcomes[pipes.pop(pipe)] = _receive(pipe)
        finally:
            for process in processes:
                process.join(timeout=5.0 if not pipes else 0.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    return _results(outcomes, size, deadline_seconds)


def _receive(connection: Connection) -> _Outcome:
    """Return one rank's outcome; a closed pipe means that it died."""
    with connection:
        try:
            # Written by our own child.
            outcome: _Outcome = pickle.loads(connection.recv_bytes())  # noqa: S301
        except EOFError:
            died = "the process died without a result"
            return _Outcome(failure=died, last_line=died)
    return outcome


def _results(outcomes: dict[int, _Outcome], size: int, deadline_seconds: float) -> list[Any]:
    """Return the results, or raise for the ranks that have none."""
    missing = f"no result after {deadline_seconds:g} s"
    late = _Outcome(failure=missing, last_line=missing, failed_at=math.inf)
    everyone = [(rank, outcomes.get(rank, late)) for rank in range(size)]
    failed = [(rank, outcome) for rank, outcome in everyone if outcome.failure is not None]
    # Causes before the ranks that waited for them; of several causes the earliest first.
    failed.sort(key=lambda entry: (entry[1].in_collective, entry[1].failed_at))
    told = [
        f"rank {rank} of {size} waited in a collective that this ended: {outcome.last_line}"
        if outcome.in_collective and k
        else f"rank {rank} of {size}: {outcome.failure}"
        for k, (rank, outcome) in enumerate(failed)
    ]
    if told:
        raise RanksFailedError("\n".join(told))
    return [outcome.result for _, outcome in everyone]


def _rank_main(
    function: Callable[[int, int], Any],
    rank: int,
    size: int,
    folder: Path,
    deadline_seconds: float,
    sender: Connection,
) -> None:
    """Join the group, run the function, send back what came of it."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=deadline_seconds),
        )
        outcome = _Outcome(result=function(rank, size))
        # Plain pickle copies tensors into the message. The pipe's own would share their memory,
        # which ends with this process.
        message = pickle.dumps(outcome)
    except BaseException as error:  # whatever ended this rank is the parent's to report
        *_, last = traceback.extract_tb(error.__traceback__)
        inside = Path(last.filename).is_relative_to(Path(dist.__file__).parent)
        outcome = _Outcome(
            failure="".join(traceback.format_exception(error)),
            last_line=traceback.format_exception_only(error)[-1].strip(),
            in_collective=inside and isinstance(error, RuntimeError),
            failed_at=time.monotonic(),
        )
        message = pickle.dumps(outcome)
    sender.send_bytes(message)
    sender.close()
    if outcome.failure is None:
        # Leave together, so that no rank closes its connections under another's collective. A rank
        # that failed leaves at once, which ends the collectives that the others wait in; here it
        # makes the barrier fail, and the failure has been reported by that rank.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
