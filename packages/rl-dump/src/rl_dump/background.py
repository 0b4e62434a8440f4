"""How dumps are written beside training: one thread, a bounded queue, no silent failure.

Invariants, each matched by a test in `tests/unit/test_background.py`:

- at most `max_pending` jobs are held; one more waits, with a deadline;
- jobs that failed raise from the next `submit`, `check` or `close`, once, all of them, with their
  paths; the jobs behind them still run;
- jobs run in the order they were given, one at a time;
- a job that is stuck holds neither `close` nor the end of the process beyond the deadline.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from rl_dump.errors import WriteError

__all__ = ["BackgroundWriter"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    path: str
    """What it writes, for the message of a failure."""
    run: Callable[[], object]
    """The work."""


class BackgroundWriter(AbstractContextManager["BackgroundWriter"]):
    """One background thread that runs writing jobs; a context manager, or call `close`.

    A process that ends without `close` waits for its jobs as `close` does, and logs what was not
    written.

    Args:
        max_pending: how many jobs may wait or run at once; each holds one batch in memory.
        deadline_seconds: longest wait for a free place in `submit`, and for the last job in
            `close`.

    Raises:
        WriteError: an option is not positive.
    """

    def __init__(self, *, max_pending: int = 1, deadline_seconds: float = 600.0) -> None:
        if max_pending < 1 or not deadline_seconds > 0:
            raise WriteError(
                "BackgroundWriter needs max_pending >= 1 and deadline_seconds > 0, got"
                f" {max_pending} and {deadline_seconds}"
            )
        self._max_pending = max_pending
        self._deadline_seconds = min(deadline_seconds, threading.TIMEOUT_MAX)
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._working = False
        self._closed = False
        self._failed: list[tuple[str, BaseException]] = []
        _open_writers.add(self)

    def submit(self, job: Callable[[], object], *, path: str | os.PathLike[str]) -> None:
        """Queue a job; returns as soon as there is a free place.

        Args:
            job: writes one file; runs in the background thread.
            path: the file, for errors.

        Raises:
            WriteError: earlier jobs failed (their paths and causes), no place became free before
                the deadline, or the writer is closed. `job` is not queued then.
        """
        with self._changed:
            if self._closed:
                raise WriteError(
                    f"dump {path} was not written: this BackgroundWriter is closed; submit before"
                    " `close`, or make another one"
                )
            free = self._changed.wait_for(
                lambda: self._count() < self._max_pending, self._deadline_seconds
            )
            self._raise_failures([] if free else self._stuck())
            self._waiting.append(_Job(path=str(path), run=job))
            if not self._working:
                self._start()

    def check(self) -> None:
        """Raise the failures of finished jobs, if there are any; never waits for a job.

        Raises:
            WriteError: names every path and cause.
        """
        with self._changed:
            self._raise_failures([])

    def close(self) -> None:
        """Wait for every job, then take no more.

        Raises:
            WriteError: jobs failed, or are not done before the deadline; names every file that was
                not written. A job that runs on is left to itself, those behind it are given up.
        """
        with self._changed:
            self._closed = True
            done = self._changed.wait_for(lambda: self._count() == 0, self._deadline_seconds)
            lost = (
                []
                if done
                else [
                    *self._stuck(),
                    *(
                        f"dump {job.path} was not written: it waited behind that one"
                        for job in self._waiting
                    ),
                ]
            )
            self._waiting.clear()
            _open_writers.discard(self)
            self._raise_failures(lost)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close.

        After an exception in the block, a failed job is logged, not raised on top of it.
        """
        try:
            self.close()
        except WriteError as failure:
            if kind is None:
                raise
            _logger.warning("%s", failure)

    def _count(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def _start(self) -> None:
        # A daemon: the interpreter does not wait for it, `close` does, with a deadline.
        thread = threading.Thread(target=self._work, name="rl-dump-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise WriteError(f"dump {self._waiting.pop().path} was not written: {error}") from error
        self._working = True

    def _work(self) -> None:
        """Run jobs until none waits; `submit` starts another thread then."""
        while True:
            with self._changed:
                if not self._waiting:
                    self._working = False
                    return
                job = self._running = self._waiting.popleft()
            failure = []
            try:
                job.run()
            except BaseException as error:  # It is told by the next call, the jobs behind it run.
                failure = [(job.path, error)]
            with self._changed:
                self._failed += failure
                self._running = None
                self._changed.notify_all()

    def _stuck(self) -> list[str]:
        job = self._running or self._waiting[0]
        return [
            f"dump {job.path} is not written after {self._deadline_seconds:g} s; is the disk stuck?"
        ]

    def _raise_failures(self, stuck: list[str]) -> None:
        failed, self._failed = self._failed, []
        told = [
            f"dump {path} was not written: {str(error) or type(error).__name__}"
            for path, error in failed
        ] + stuck
        if told:
            raise WriteError("; ".join(told)) from (failed[0][1] if failed else None)


_open_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


@atexit.register
def _close_open_writers() -> None:
    for writer in list(_open_writers):
        try:
            writer.close()
        except WriteError as failure:
            _logger.error("at exit: %s", failure)  # noqa: TRY400 - the file and the cause say all
