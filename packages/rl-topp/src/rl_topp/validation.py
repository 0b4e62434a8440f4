"""What makes the arrays of a `NucleusSet` right, as pure checks over numpy arrays.

Invariants: `find_problems` returns [] exactly for well-formed sets; every sentence names the
token (0-based) and says what was found and what was expected; cost is O(nnz log nnz) time, a few
temporary arrays of nnz entries.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from rl_topp.errors import NucleusError

__all__ = [
    "as_integers",
    "check_count",
    "check_on_truncated",
    "find_offset_problems",
    "find_problems",
    "is_integer",
    "row_of_each_id",
]

_NUM_STATUS = 4
_KEPT, _NO_FILTER, _NOT_SAMPLED = 0, 1, 2


def as_integers(
    values: object, dtype: type[np.signedinteger[Any] | np.unsignedinteger[Any]], name: str
) -> npt.NDArray[Any]:
    """Return `values` as a one-dimensional array of `dtype`, refusing any change of value.

    Raises:
        NucleusError: not one-dimensional, not integers, or out of the range of `dtype`.
    """
    try:
        array = np.asarray(values)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # lists nested unevenly; tensors that are no host memory
        raise NucleusError(f"{name} must be a flat list or array of integers: {error}") from error
    if array.ndim != 1:
        raise NucleusError(f"{name} must have one dimension, got shape {list(array.shape)}")
    if array.size == 0:
        return np.zeros(0, dtype)
    if array.dtype.kind not in "iu":
        raise NucleusError(f"{name} must hold integers, got dtype {array.dtype}")
    limits = np.iinfo(dtype)
    if array.dtype != dtype and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        bad = int(np.flatnonzero((array < limits.min) | (array > limits.max))[0])
        raise NucleusError(
            f"{name}[{bad}] is {int(array[bad])}, outside the range of {np.dtype(dtype).name}"
        )
    return np.ascontiguousarray(array, dtype=dtype)


def is_integer(value: object) -> TypeGuard[int]:
    """Say whether `value` is a Python or numpy integer; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_count(value: object, name: str) -> None:
    """Raise a `NucleusError` unless `value` is an integer of at least 0."""
    if not is_integer(value) or value < 0:
        raise NucleusError(f"{name} must be an integer of at least 0, got {value!r}")


def check_on_truncated(value: object) -> None:
    """Raise a `NucleusError` unless `value` is one of the two answers to an incomplete set."""
    if value not in ("mask", "full"):
        raise NucleusError(f"on_truncated must be 'mask' or 'full', got {value!r}")


def row_of_each_id(offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the token index of every id, int64 [nnz]: offsets [0, 2, 2, 3] give [0, 0, 2]."""
    return np.repeat(np.arange(offsets.size - 1, dtype=np.int64), np.diff(offsets))


def find_offset_problems(
    offsets: npt.NDArray[np.int64], *, num_ids: int, num_tokens: int
) -> list[str]:
    """Check the CSR offsets of `num_tokens` tokens over `num_ids` ids; return one sentence per problem."""
    if offsets.size == 0:
        return [
            f"offsets are empty, expected {num_tokens + 1} of them ({num_tokens} tokens + 1), the"
            " first 0"
        ]
    problems = []
    if offsets.size != num_tokens + 1:
        problems.append(
            f"got {offsets.size} offsets, expected {num_tokens + 1} ({num_tokens} tokens + 1)"
        )
    if offsets[0] != 0:
        problems.append(f"the first offset must be 0, got {offsets[0]}")
    # Compared, not subtracted: the difference of two large offsets wraps around. Without a fall
    # between 0 and the number of ids all lie within.
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        token = int(falls[0])
        problems.append(
            f"offsets must not decrease: token {token} goes from {offsets[token]} to"
            f" {offsets[token + 1]}"
        )
    if offsets[-1] != num_ids:
        problems.append(f"the last offset is {offsets[-1]}, expected the number of ids, {num_ids}")
    return problems


def find_problems(
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    status: npt.NDArray[np.uint8],
    vocab_size: int,
) -> list[str]:
    """Check one CSR record.

    Args:
        ids: int32 [nnz].
        offsets: int64 [T+1].
        status: uint8 [T].
        vocab_size: number of token ids.

    Returns:
        One sentence per kind of problem, each naming the first token that has it; [] for a
        well-formed record.
    """
    if not is_integer(vocab_size) or vocab_size < 1:
        return [f"vocab_size must be an integer of at least 1, got {vocab_size!r}"]
    problems = find_offset_problems(offsets, num_ids=ids.size, num_tokens=status.size)
    if problems:
        return problems
    return [*_status_problems(np.diff(offsets), status), *_id_problems(ids, offsets, vocab_size)]


def _status_problems(counts: npt.NDArray[np.int64], status: npt.NDArray[np.uint8]) -> list[str]:
    problems = []
    unknown = np.flatnonzero(status >= _NUM_STATUS)
    if unknown.size:
        problems.append(
            f"token {unknown[0]} has status {status[unknown[0]]}, expected 0 to {_NUM_STATUS - 1}"
        )
    empty = np.flatnonzero((status == _KEPT) & (counts == 0))
    if empty.size:
        problems.append(
            f"token {empty[0]} has status 0 (kept set recorded) but no ids; use status 1 for no"
            " filter, 2 for not sampled, 3 for a lost set"
        )
    filled = np.flatnonzero(((status == _NO_FILTER) | (status == _NOT_SAMPLED)) & (counts != 0))
    if filled.size:
        problems.append(
            f"token {filled[0]} has status {status[filled[0]]}, which carries no ids, but"
            f" {counts[filled[0]]} ids"
        )
    return problems


def _id_problems(
    ids: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], vocab_size: int
) -> list[str]:
    problems = []
    rows = row_of_each_id(offsets)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        first = outside[0]
        problems.append(
            f"token {rows[first]} keeps id {ids[first]}, outside the vocabulary [0, {vocab_size})"
        )
    # One key per (token, id): sorting keys finds repeats inside a token without a loop over tokens.
    keys = np.sort((rows << 32) | ids.astype(np.int64) & 0xFFFFFFFF)
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if repeated.size:
        key = int(keys[repeated[0]])
        problems.append(
            f"token {key >> 32} keeps id {np.int64(key & 0xFFFFFFFF).astype(np.int32)} more than"
            " once"
        )
    return problems
