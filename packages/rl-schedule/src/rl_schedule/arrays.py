"""Integer columns: how caller input becomes read-only int64, and what is refused.

Floats and booleans are refused even when integral: a float length is a bug upstream.

Invariant: whatever leaves `integer_column` is a one-dimensional, C-contiguous, read-only int64
array whose values equal the caller's.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rl_schedule.errors import ScheduleError

__all__ = [
    "FloatArray",
    "IntArray",
    "Integers",
    "integer_column",
    "positive_column",
    "positive_int",
    "read_only",
]

IntArray: TypeAlias = npt.NDArray[np.int64]
"""An int64 array; shapes are stated where it is used."""

FloatArray: TypeAlias = npt.NDArray[np.float64]
"""A float64 array; shapes are stated where it is used."""

Integers: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
"""What callers may pass for a column of integers."""


def read_only(array: IntArray) -> IntArray:
    """Return `array` with its write flag cleared."""
    array.flags.writeable = False
    return array


def integer_column(values: object, name: str) -> IntArray:
    """Copy a caller's column into a read-only int64 array [n].

    Args:
        values: a sequence or array of integers; its dtype must be an integer dtype that fits int64.
        name: how the column is called in errors.

    Raises:
        ScheduleError: not one-dimensional, or a value that is not an integer (named by its
            position).
    """
    given = values if isinstance(values, np.ndarray) else _listed(values, name)
    if given.ndim != 1:
        raise ScheduleError(
            f"{name} must be one-dimensional, got shape {given.shape}; pass one integer per sample"
        )
    if given.size == 0:
        return read_only(np.empty(0, dtype=np.int64))
    if given.dtype.kind not in "iu":
        raise ScheduleError(
            f"{name} must be integers, but {name}[0] is {given[0]!r} (dtype {given.dtype}); convert"
            " the column first"
        )
    if given.dtype.kind == "u" and int(given.max()) > np.iinfo(np.int64).max:
        raise ScheduleError(f"{name}[{int(given.argmax())}] = {given.max()} does not fit int64")
    return read_only(np.array(given, dtype=np.int64, order="C"))


def positive_column(values: object, name: str) -> IntArray:
    """Copy a caller's column of integers >= 1, for example token counts.

    Raises:
        ScheduleError: as `integer_column`, or a value below 1 (named by its position).
    """
    column = integer_column(values, name)
    bad = np.flatnonzero(column < 1)
    if bad.size:
        first = int(bad[0])
        raise ScheduleError(
            f"{name} must be >= 1, but sample {first} has {int(column[first])} ({bad.size} such"
            " samples); remove empty samples before scheduling"
        )
    return column


def positive_int(value: object, name: str) -> int:
    """Return `value` as a Python int if it is an integer >= 1.

    Raises:
        ScheduleError: anything else, booleans included.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ScheduleError(f"{name} must be an integer >= 1, got {value!r}")
    if value < 1:
        raise ScheduleError(f"{name} must be >= 1, got {value}")
    return int(value)


def _listed(values: object, name: str) -> IntArray:
    """Return a sequence of Python or numpy integers as int64; name the first entry that is none."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ScheduleError(f"{name} must be a sequence of integers, got {type(values).__name__}")
    entries = list(values)
    # By type, not entry by entry: a million lengths have one or two types. bool is a kind of int.
    foreign = {
        kind
        for kind in set(map(type, entries))
        if not issubclass(kind, (int, np.integer)) or issubclass(kind, bool)
    }
    if foreign:
        position = next(i for i, entry in enumerate(entries) if type(entry) in foreign)
        raise ScheduleError(
            f"{name} must be integers, but {name}[{position}] is {entries[position]!r}; convert the"
            " column first"
        )
    try:
        return np.array(entries, dtype=np.int64)
    except OverflowError as error:
        position = next(i for i, entry in enumerate(entries) if not -(2**63) <= int(entry) < 2**63)
        raise ScheduleError(
            f"{name}[{position}] = {entries[position]} does not fit int64"
        ) from error
