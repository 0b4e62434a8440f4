"""Arrays that grow at their end, and the three of a kept-set record that grow together.

Axes: T tokens, nnz kept ids.

Invariants: views taken earlier keep their values (growth writes only beyond them, or moves to a new
buffer); n extensions copy each element a constant number of times on average, because the capacity
at least doubles; the unused end has one owner at a time, and what is written there counts only once
all three arrays hold it, so neither a second thread nor a failed allocation can leave a record half
grown.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GrowingArray", "GrowingRecord", "RecordArrays"]

_SMALLEST_CAPACITY = 64

RecordArrays = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]
"""ids int32 [nnz], offsets int64 [T+1], status uint8 [T]."""


class GrowingArray:
    """A growable buffer of one dtype; whoever uses it knows how much of it counts."""

    __slots__ = ("_buffer",)

    def __init__(self, start: npt.NDArray[Any]) -> None:
        """Copy `start` into a buffer with room for as much again."""
        self._buffer = np.empty(max(_SMALLEST_CAPACITY, 2 * start.size), start.dtype)
        self._buffer[: start.size] = start

    def write(self, size: int, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Put `values` behind the first `size` elements, over whatever lay there.

        Returns:
            All that now counts, without a copy.
        """
        new_size = size + values.size
        if new_size > self._buffer.size:
            larger = np.empty(max(new_size, 2 * self._buffer.size), self._buffer.dtype)
            larger[:size] = self._buffer[:size]
            self._buffer = larger
        self._buffer[size:new_size] = values
        return self._buffer[:new_size]


class GrowingRecord:
    """Buffers behind the newest record of a chain; older records are views of their beginnings."""

    __slots__ = ("_ids", "_lock", "_offsets", "_sizes", "_status")

    def __init__(self, start: RecordArrays) -> None:
        """Copy the arrays of a record."""
        self._ids, self._offsets, self._status = map(GrowingArray, start)
        self._sizes = int(start[0].size), int(start[2].size)
        self._lock = threading.Lock()

    def extend(self, num_tokens: int, other: RecordArrays) -> RecordArrays | None:
        """Return the record of `num_tokens` tokens followed by `other`, as views.

        None when that record is not the newest of the chain, or another thread is growing the chain
        at this moment: the caller copies then. Nobody waits, so a process forked while a thread
        holds the chain cannot hang on it.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._grow(other) if self._sizes[1] == num_tokens else None
        finally:
            self._lock.release()

    def _grow(self, other: RecordArrays) -> RecordArrays:
        num_ids, num_tokens = self._sizes
        ids, offsets, status = other
        grown = (
            self._ids.write(num_ids, ids),
            self._offsets.write(num_tokens + 1, offsets[1:] + num_ids),
            self._status.write(num_tokens, status),
        )
        # One assignment makes all three count, after the last of them was written.
        self._sizes = int(grown[0].size), int(grown[2].size)
        return grown
