"""Decide how dumps are written beside the training loop: one thread, a bounded queue, and no failure that stays silent.

Layer: algorithms (standard library only).

Invariants, each matched by a test in `tests/unit/test_background.py`:

- at most `max_pending` jobs are held; one more waits, with a deadline;
- a job that failed raises from the next `submit`, `check` or `close`, once, with its path;
- jobs run in the order they were given, one at a time.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from typing import TYPE_CHECKING

from typing_extensions import Self

from rl_dump.errors import WriteError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Run writing jobs in one background thread; use as a context manager, or call `close`.

    Args:
        max_pending: how many jobs may wait or run at once; each holds one batch in memory.
        deadline_seconds: longest wait for a free place in `submit`, and for the last job in `close`.

    Raises:
        WriteError: a deadline is not positive, or there is no room for a job.
    """

    def __init__(self, *, max_pending: int = 1, deadline_seconds: float = 600.0) -> None:
        if max_pending < 1 or deadline_seconds <= 0:
            msg = f"BackgroundWriter needs max_pending >= 1 and deadline_seconds > 0, got {max_pending} and {deadline_seconds}"
            raise WriteError(msg)
        self._max_pending = max_pending
        self._deadline_seconds = deadline_seconds
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="rl-dump-writer")
        self._pending: deque[tuple[str, concurrent.futures.Future[object]]] = deque()

    @property
    def num_pending(self) -> int:
        """Jobs that wait or run now."""
        return sum(not future.done() for _, future in self._pending)

    def submit(self, job: Callable[[], object], *, path: str | os.PathLike[str]) -> None:
        """Queue a job; returns as soon as there is a free place.

        Args:
            job: writes one file; runs in the background thread.
            path: the file, for errors.

        Raises:
            WriteError: an earlier job failed (its path and cause), or no place became free before the deadline. `job` is not queued then.
        """
        self._reap(keep=self._max_pending - 1)
        self._pending.append((str(path), self._executor.submit(job)))

    def check(self) -> None:
        """Raise the failure of a finished job, if there is one; never waits.

        Raises:
            WriteError: names the path and the cause.
        """
        while self._pending and self._pending[0][1].done():
            self._finish(0.0)

    def close(self) -> None:
        """Wait for every job and end the thread.

        Raises:
            WriteError: a job failed or is not done before the deadline.
        """
        try:
            self._reap(keep=0)
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close; after an exception in the block, a failed job is not raised on top of it."""
        try:
            self.close()
        except WriteError:
            if kind is None:
                raise

    def _reap(self, *, keep: int) -> None:
        self.check()
        limit = time.monotonic() + self._deadline_seconds
        while len(self._pending) > keep:
            self._finish(max(limit - time.monotonic(), 0.0))

    def _finish(self, timeout: float) -> None:
        path, future = self._pending[0]
        try:
            error = future.exception(timeout)
        except concurrent.futures.TimeoutError:
            msg = f"dump {path} is not written after {self._deadline_seconds:g} s; is the disk stuck?"
            raise WriteError(msg) from None
        self._pending.popleft()
        if error is not None:
            msg = f"dump {path} was not written: {error}"
            raise WriteError(msg) from error
