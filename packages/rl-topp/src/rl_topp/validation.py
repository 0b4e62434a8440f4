"""What makes the arrays of a `NucleusSet` right, as pure checks over numpy arrays.

Axes: T tokens, nnz kept ids of all of them.

Invariants: `find_problems` returns [] exactly for well-formed sets; every sentence names the
token (0-based) and says what was found and what was expected; cost is O(nnz log nnz) time, a few
temporary arrays of nnz entries.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal, TypeGuard

import numpy as np
import numpy.typing as npt

from rl_topp.errors import NucleusError

__all__ = [
    "NucleusStatus",
    "OnTruncated",
    "as_indices",
    "as_integers",
    "check_count",
    "check_on_truncated",
    "find_offset_problems",
    "find_problems",
    "is_integer",
    "refuse_first",
    "row_of_each_id",
]

OnTruncated = Literal["mask", "full"]
"""What a token with an incomplete set is worth.

`mask` = no log-prob, `full` = the log-prob over the vocabulary.
"""


class NucleusStatus(IntEnum):
    """State of knowledge about the set of one token."""

    KEPT = 0
    """The kept set is recorded and complete."""
    NO_FILTER = 1
    """No filter applied: the sampler chose from the whole vocabulary; no ids stored."""
    NOT_SAMPLED = 2
    """A tool or environment token: no log-prob exists, its loss mask is 0; no ids stored."""
    TRUNCATED = 3
    """A filter applied, but transport lost part of the set.

    The ids that arrived (possibly none) give no log-prob.
    """


def as_integers(
    values: object, dtype: type[np.signedinteger[Any] | np.unsignedinteger[Any]], name: str
) -> npt.NDArray[Any]:
    """Return `values` as a one-dimensional array of `dtype`, refusing any change of value.

    Raises:
        NucleusError: not one-dimensional, not integers, or out of the range of `dtype`.
    """
    try:
        array = np.asarray(values)
    # Lists nested unevenly; tensors that lie on a device or still need a gradient.
    except (TypeError, ValueError, RuntimeError) as error:
        raise NucleusError(f"{name} must be a flat list or array of integers: {error}") from error
    if array.ndim != 1:
        raise NucleusError(f"{name} must have one dimension, got shape {list(array.shape)}")
    if array.size == 0:
        return np.zeros(0, dtype)
    if array.dtype.kind not in "iu":
        raise NucleusError(f"{name} must hold integers, got dtype {array.dtype}")
    limits = np.iinfo(dtype)
    # The extremes are compared first: no temporary arrays where all is well.
    if array.dtype != dtype and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        refuse_first(
            (array < limits.min) | (array > limits.max),
            lambda place: (
                f"{name}[{place}] is {int(array[place])}, outside the range of"
                f" {np.dtype(dtype).name}"
            ),
        )
    return np.ascontiguousarray(array, dtype=dtype)


def as_indices(values: object, limit: int, name: str) -> npt.NDArray[np.int64]:
    """Return `values` as int64 [K], all in [0, limit).

    Raises:
        NucleusError: not flat integers, or one lies outside; names its place.
    """
    index: npt.NDArray[np.int64] = as_integers(values, np.int64, name)
    refuse_first(
        (index < 0) | (index >= limit),
        lambda place: f"{name}[{place}] is {index[place]}, which lies outside [0, {limit})",
    )
    return index


def refuse_first(wrong: npt.NDArray[np.bool_], sentence: Callable[[int], str]) -> None:
    """Raise a `NucleusError` about the first place where `wrong` holds, or return.

    Args:
        wrong: [N].
        sentence: what is wrong at a place.
    """
    for place in np.flatnonzero(wrong)[:1]:
        raise NucleusError(sentence(int(place)))


def is_integer(value: object) -> TypeGuard[int]:
    """Say whether `value` is a Python or numpy integer, other than True and False."""
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
    """Return one sentence per problem of the offsets of `num_tokens` tokens over `num_ids` ids."""
    if offsets.size == 0:
        return [
            f"offsets are empty, expected {num_tokens + 1} ({num_tokens} tokens + 1), the first 0"
        ]
    # Compared, not subtracted: the difference of two large offsets wraps around. Without a fall
    # between 0 and the number of ids all lie within.
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    found = {
        f"got {offsets.size} offsets, expected {num_tokens + 1} ({num_tokens} tokens + 1)": (
            offsets.size != num_tokens + 1
        ),
        f"the first offset must be 0, got {offsets[0]}": offsets[0] != 0,
        **{
            f"offsets must not decrease: token {token} goes from {offsets[token]} to"
            f" {offsets[token + 1]}": True
            for token in falls[:1]
        },
        f"the last offset is {offsets[-1]}, expected the number of ids, {num_ids}": (
            offsets[-1] != num_ids
        ),
    }
    return [sentence for sentence, holds in found.items() if holds]


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
    carries_none = (status == NucleusStatus.NO_FILTER) | (status == NucleusStatus.NOT_SAMPLED)
    kinds = (
        (status >= len(NucleusStatus), f", expected 0 to {len(NucleusStatus) - 1}"),
        (
            (status == NucleusStatus.KEPT) & (counts == 0),
            (
                " (kept set recorded) but no ids; use status 1 for no filter, 2 for not sampled, 3"
                " for a lost set"
            ),
        ),
        (carries_none & (counts != 0), ", which carries no ids, but {count} ids"),
    )
    return [
        f"token {token} has status {status[token]}{words.format(count=counts[token])}"
        for wrong, words in kinds
        for token in np.flatnonzero(wrong)[:1]
    ]


def _id_problems(
    ids: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], vocab_size: int
) -> list[str]:
    rows = row_of_each_id(offsets)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    # One key per (token, id): sorting keys finds repeats inside a token without a loop over tokens.
    # The mask keeps the 32 bits of a negative id, which a sign extension would spread over the row.
    keys = np.sort((rows << 32) | ids.astype(np.int64) & 0xFFFFFFFF)
    repeated = keys[1:][keys[1:] == keys[:-1]]
    return [
        *(
            f"token {rows[i]} keeps id {ids[i]}, outside the vocabulary [0, {vocab_size})"
            for i in outside[:1]
        ),
        *(
            f"token {key >> 32} keeps id {(key & 0xFFFFFFFF).astype(np.int32)} more than once"
            for key in repeated[:1]
        ),
    ]
