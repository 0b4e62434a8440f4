"""Columns: how lists, arrays and tensors of a caller become read-only arrays; what is refused.

One rule for every column: a sequence, a numpy array, an array of objects whose entries are numbers,
or a tensor, which is detached and copied to the host where it is not there. A count is an integer:
booleans and fractions, also whole ones such as 2.0, are refused, because a float length is a bug
upstream. Text is never read as a number.

Invariant: whatever leaves `integer_column` is a one-dimensional, C-contiguous, read-only int64
array whose values equal the caller's.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_schedule.errors import ScheduleError

__all__ = [
    "FloatArray",
    "Identifiers",
    "IntArray",
    "Integers",
    "cost_column",
    "identifier_column",
    "integer_column",
    "on_host",
    "positive_column",
    "positive_int",
    "read_only",
]

IntArray: TypeAlias = npt.NDArray[np.int64]
"""An int64 array; shapes are stated where it is used."""

FloatArray: TypeAlias = npt.NDArray[np.float64]
"""A float64 array; shapes are stated where it is used."""

Integers: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
"""What callers may pass for a column of integers; a tensor of integers will do too."""

Identifiers: TypeAlias = Integers | Sequence[str] | npt.NDArray[np.object_] | npt.NDArray[np.str_]
"""What callers may pass for a column of ids: integers or strings."""


def read_only(array: IntArray) -> IntArray:
    """Return `array` with its write flag cleared."""
    array.flags.writeable = False
    return array


def on_host(values: object) -> object:
    """Return a tensor as a numpy array, detached and copied to the host; anything else as it is.

    Tensors are known by their methods: this package imports no torch.
    """
    if not (hasattr(values, "detach") and hasattr(values, "cpu")):
        return values
    tensor: Any = values.detach().cpu()
    # numpy has no bfloat16; only the message about a column of floats needs it.
    return np.asarray(tensor.float() if "float" in str(tensor.dtype) else tensor)


def integer_column(values: object, name: str) -> IntArray:
    """Copy a caller's column into a read-only int64 array [n].

    Args:
        values: a sequence of integers, an array of an integer dtype that fits int64, an array of
            objects that are all integers, or a tensor of an integer dtype, on any device.
        name: how the column is called in errors.

    Raises:
        ScheduleError: not one-dimensional, or a value that is not an integer (named by its
            position).
    """
    found = on_host(values)
    if isinstance(found, np.ndarray) and found.dtype.kind == "O" and found.ndim == 1:
        # numpy and pandas put integers into arrays of objects; their entries decide.
        found = found.tolist()
    given = found if isinstance(found, np.ndarray) else _listed(found, name)
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


def identifier_column(values: object, name: str) -> tuple[IntArray, tuple[str, ...]]:
    """Copy a caller's column of ids, integers or strings, into int64 [n].

    Strings are numbered by first appearance. Example: `["b", "a", "b"]` gives `[0, 1, 0]` and
    `("b", "a")`.

    Args:
        values: as `integer_column`, or a sequence or array of strings.
        name: how the column is called in errors.

    Returns:
        The column, read-only, and the string behind each number; `()` for integers.

    Raises:
        ScheduleError: as `integer_column`, or strings mixed with anything else.
    """
    is_text = isinstance(values, np.ndarray) and values.dtype.kind in "OUT" and values.ndim == 1
    entries = values.tolist() if is_text and isinstance(values, np.ndarray) else values
    if not isinstance(entries, (list, tuple)) or not entries:
        return integer_column(values, name), ()
    # By type, not entry by entry: a million ids have one or two types.
    sorts = {kind: _sort_of_id(kind) for kind in set(map(type, entries))}
    found = set(sorts.values())
    if found == {"number"}:
        return integer_column(entries, name), ()
    if found != {"text"}:
        first = sorts[type(entries[0])]
        other = next((i for i, entry in enumerate(entries) if sorts[type(entry)] != first), 0)
        beside = f" and {name}[{other}] is {entries[other]!r}" if other else ""
        raise ScheduleError(
            f"{name} must be all integers or all strings (try str(id)), but {name}[0] is"
            f" {entries[0]!r}{beside}"
        )
    numbering: dict[str, int] = {}
    codes = [numbering.setdefault(str(entry), len(numbering)) for entry in entries]
    return read_only(np.array(codes, dtype=np.int64)), tuple(numbering)


def _sort_of_id(kind: type) -> str:
    """Return "text", "number" (also what only `integer_column` can judge), or "other"."""
    if issubclass(kind, str):
        return "text"
    numbers = (float, complex, np.generic, np.ndarray, list, tuple)
    return "number" if issubclass(kind, numbers) or hasattr(kind, "__index__") else "other"


def cost_column(values: object, name: str) -> npt.NDArray[Any]:
    """Copy a caller's column of costs into a read-only array [n], int64 or float64.

    Args:
        values: a sequence, array or tensor of finite numbers >= 0.
        name: how the column is called in errors.

    Raises:
        ScheduleError: not one-dimensional, not numbers, or a value that is not finite or below 0
            (named by its position).
    """
    found = on_host(values)
    if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
        raise ScheduleError(f"{name} must be a sequence of numbers, got {type(values).__name__}")
    try:
        given = np.array([_scalar(entry) for entry in found])
    except (TypeError, ValueError, OverflowError) as error:
        raise ScheduleError(f"{name} must be a list of numbers: {error}") from error
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iuf"):
        raise ScheduleError(
            f"{name} must be one number per sample, got dtype {given.dtype}, shape {given.shape}"
        )
    bad = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if bad.size:
        raise ScheduleError(
            f"{name} must be finite and >= 0, but sample {int(bad[0])} has {given[bad[0]]}"
        )
    kept = given.astype(np.int64 if given.dtype.kind == "i" else np.float64)
    kept.flags.writeable = False
    return kept


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
    if value >= 2**63:
        raise ScheduleError(
            f"{name} must fit int64, got a number of {int(value).bit_length()} bits; is it right?"
        )
    return int(value)


def _scalar(entry: object) -> object:
    """Return what an array or a tensor without dimensions holds; anything else as it is."""
    if type(entry) is int or getattr(entry, "shape", None) != () or isinstance(entry, np.generic):
        return entry
    return entry.item() if hasattr(entry, "item") else entry


def _listed(values: object, name: str) -> IntArray:
    """Return a sequence of Python or numpy integers as int64; name the first entry that is none."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ScheduleError(f"{name} must be a sequence of integers, got {type(values).__name__}")
    entries: list[Any] = [_scalar(entry) for entry in values]
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
