"""`GrowingArray`: a one-dimensional numpy array that grows at its end.

Layer: below the record. Invariants: views taken earlier keep their values (growth writes only beyond them, or moves to a new buffer); n extensions copy
each element a constant number of times on average, because the capacity at least doubles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GrowingArray"]

_SMALLEST_CAPACITY = 64


class GrowingArray:
    """A growable buffer of one dtype."""

    __slots__ = ("_buffer", "size")

    def __init__(self, start: npt.NDArray[Any]) -> None:
        """Copy `start` into a buffer with room for as much again."""
        self.size = int(start.size)
        self._buffer = np.empty(max(_SMALLEST_CAPACITY, 2 * self.size), start.dtype)
        self._buffer[: self.size] = start

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Add `values` at the end."""
        new_size = self.size + int(values.size)
        if new_size > self._buffer.size:
            larger = np.empty(max(new_size, 2 * self._buffer.size), self._buffer.dtype)
            larger[: self.size] = self._buffer[: self.size]
            self._buffer = larger
        self._buffer[self.size : new_size] = values
        self.size = new_size

    def view(self) -> npt.NDArray[Any]:
        """Return the filled part, without a copy."""
        return self._buffer[: self.size]
