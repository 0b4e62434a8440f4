"""Whether two dumps hold the same, and where they first part.

Invariants, each matched by a test in `tests/property/test_compare_laws.py`:

- a dump compared with itself, in any container, differs nowhere;
- `compare(a, b)` and `compare(b, a)` name the same place.

Axes: N samples, T values of all samples of a field end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_dump.columns.fields import Column
from rl_dump.columns.ragged import RaggedArray
from rl_dump.errors import DumpError
from rl_dump.reader import Dump

__all__ = ["Difference", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two dumps first differ, and by how much each field does."""

    rollout_position: int | None
    """Position of the first sample that differs.

    None if the dumps hold different samples or fields.
    """
    token: int | None
    """First value of that sample that differs, 0-based.

    None where the field has one value per sample, or only lengths differ.
    """
    field: str
    """First field, by name, that differs there.

    It is `rollout_position` if the samples are not the same.
    """
    first: Any
    """What the first dump holds there."""
    second: Any
    """What the second dump holds there."""
    largest: Mapping[str, float]
    """Per field that differs, the largest absolute difference.

    It is inf where lengths or types differ, or values that are not numbers.
    """
    message: str
    """The same in one sentence."""


class _Found(NamedTuple):
    """The first place where one column differs; sorts by row, then token, then name."""

    row: int
    """Place of the sample among those in both dumps, by position, 0-based."""
    token: int
    """-1 where the column has one value per sample, or the lengths differ."""
    name: str
    """The field's name."""
    first: Any
    """What the first dump holds there."""
    second: Any
    """What the second dump holds there."""
    largest: float
    """The column's largest absolute difference."""


def compare(
    first: Dump, second: Dump, *, atol: float = 0.0, rtol: float = 0.0
) -> Difference | None:
    """Compare two dumps sample by sample, matched by rollout position.

    Floats differ if `|a - b| > atol + rtol * max(|a|, |b|)`, whole numbers (also one against a
    float) if they are not the same number; NaN equals NaN. With rtol 0.1, 1.0 and 1.1 are equal
    from either side. Fields that say where a sample ran and the headers are not compared. Dumps
    that hold different samples or fields differ; what both hold is compared as well, and the
    message says what came of it.

    Args:
        first: a dump.
        second: another, of the same contract.
        atol: absolute tolerance, for floats.
        rtol: relative tolerance, for floats.

    Returns:
        The first difference - lowest position, then lowest token, then field name - or None.

    Raises:
        DumpError: the dumps are of different contracts, damaged, or a tolerance is negative,
            infinite or NaN.
    """
    if first.contract != second.contract:
        raise DumpError(
            f"{first.path} is a {first.contract}, {second.path} a {second.contract}; compare two of"
            " one kind"
        )
    if not (0 <= atol < math.inf and 0 <= rtol < math.inf):
        raise DumpError(
            f"tolerances must be finite and not negative, got atol {atol} and rtol {rtol}"
        )
    rows = _common_rows(first, second)
    found = _first_difference(first, second, rows, atol, rtol)
    whole = _different_samples(first, second) or _different_fields(first, second)
    if whole is None:
        return found
    common = len(rows[0])
    if not common:
        told = "no sample is in both"
    elif found is None:
        told = f"what both hold of the {common} samples in both is equal"
    else:
        told = f"of the {common} samples in both: {found.message}"
    largest = {**whole.largest, **(found.largest if found is not None else {})}
    return replace(whole, largest=largest, message=f"{whole.message}; {told}")


def _common_rows(first: Dump, second: Dump) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of the samples in both, by position.

    Positions that stand several times pair up only if they do so on both sides.
    """
    left, right = first.positions(), second.positions()
    # Stable: positions that stand several times keep the order of the file on both sides.
    orders = np.argsort(left, kind="stable"), np.argsort(right, kind="stable")
    if np.array_equal(left[orders[0]], right[orders[1]]):
        return orders
    once = [
        np.unique(positions, return_index=True, return_counts=True) for positions in (left, right)
    ]
    single = [(values[counts == 1], rows[counts == 1]) for values, rows, counts in once]
    _, mine, theirs = np.intersect1d(
        single[0][0], single[1][0], assume_unique=True, return_indices=True
    )
    return single[0][1][mine], single[1][1][theirs]


def _first_difference(
    first: Dump,
    second: Dump,
    rows: tuple[NDArray[np.int64], NDArray[np.int64]],
    atol: float,
    rtol: float,
) -> Difference | None:
    right = second.columns()
    places = [
        found
        for name, column in first.columns().items()
        if name in right
        and name not in _PLACEMENT
        and (
            found := _compare_columns(
                name, column.take(rows[0]), right[name].take(rows[1]), atol=atol, rtol=rtol
            )
        )
        is not None
    ]
    if not places:
        return None
    place = min(places, key=lambda found: found[:3])
    token = None if place.token < 0 else place.token
    position = int(first.positions()[rows[0]][place.row])
    at = "" if token is None else f", value {token}"
    return Difference(
        rollout_position=position,
        token=token,
        field=place.name,
        first=place.first,
        second=place.second,
        largest={found.name: found.largest for found in places},
        message=(
            f"sample at rollout position {position}{at}: {place.name} is {place.first} in the first"
            f" dump, {place.second} in the second"
        ),
    )


# Where a sample ran is not what it holds: two layouts of one batch must be comparable.
_PLACEMENT = frozenset({"step", "micro_batch", "data_parallel_rank"})


def _different_samples(first: Dump, second: Dump) -> Difference | None:
    if np.array_equal(np.sort(first.positions()), np.sort(second.positions())):
        return None
    left, right = set(first.positions().tolist()), set(second.positions().tolist())
    only = sorted(left ^ right)
    message = f"{first.num_samples} samples in the first dump, {second.num_samples} in the second"
    if only:
        message += (
            f"; rollout position {only[0]} is only in the"
            f" {'first' if only[0] in left else 'second'}"
        )
    return Difference(
        rollout_position=only[0] if only else None,
        token=None,
        field="rollout_position",
        first=first.num_samples,
        second=second.num_samples,
        largest={"rollout_position": math.inf},
        message=message,
    )


def _different_fields(first: Dump, second: Dump) -> Difference | None:
    left, right = set(first.fields) - _PLACEMENT, set(second.fields) - _PLACEMENT
    if left == right:
        return None
    only = sorted(left ^ right)
    side = "first" if only[0] in left else "second"
    return Difference(
        rollout_position=None,
        token=None,
        field=only[0],
        first=only[0] in left,
        second=only[0] in right,
        largest=dict.fromkeys(only, math.inf),
        message=(
            f"field {only[0]} is only in the {side} dump ({len(only)} fields are in one of them"
            " only)"
        ),
    )


def _compare_columns(
    name: str, first: Column, second: Column, *, atol: float, rtol: float
) -> _Found | None:
    left, right = first.values, second.values
    if isinstance(left, RaggedArray) and isinstance(right, RaggedArray):
        if left.values.shape[1:] == right.values.shape[1:]:
            return _compare_ragged(name, first, second, atol=atol, rtol=rtol)
    elif isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        wrong, distance = _unequal(left, right, atol=atol, rtol=rtol)
        wrong |= _valid(first) != _valid(second)
        rows = np.flatnonzero(wrong & (_valid(first) | _valid(second)))
        if not rows.size:
            return None
        row, largest = int(rows[0]), float(distance[rows].max())
        return _Found(row, -1, name, first.item(row), second.item(row), largest)
    for row in range(len(first)):
        mine, theirs = first.item(row), second.item(row)
        if not _same_object(mine, theirs):
            return _Found(row, -1, name, _short(mine), _short(theirs), math.inf)
    return None


def _compare_ragged(
    name: str, first: Column, second: Column, *, atol: float, rtol: float
) -> _Found | None:
    left, right = first.values, second.values
    assert isinstance(left, RaggedArray)
    assert isinstance(right, RaggedArray)
    found = []
    same = left.lengths == right.lengths
    a, b = left.take(np.flatnonzero(same)), right.take(np.flatnonzero(same))
    # One row per token, [T, trailing]: a token differs if any of its numbers does.
    shape = (len(a.values), math.prod(a.values.shape[1:]))
    wrong, distance = _unequal(
        a.values.reshape(shape), b.values.reshape(shape), atol=atol, rtol=rtol
    )
    tokens = np.flatnonzero(wrong.any(axis=1)) if wrong.size else np.zeros(0, np.int64)
    if tokens.size:
        # The sample a token lies in is the last one that starts at or before it.
        item = int(np.searchsorted(a.offsets, tokens[0], side="right")) - 1
        row, token = int(np.flatnonzero(same)[item]), int(tokens[0] - a.offsets[item])
        values = a[item][token].tolist(), b[item][token].tolist()
        found.append(_Found(row, token, name, *values, float(distance.max())))
    other = np.flatnonzero(~same | (_valid(first) != _valid(second)))
    if other.size:
        row = int(other[0])
        found.append(_Found(row, -1, name, _length(first, row), _length(second, row), math.inf))
    if not found:
        return None
    return min(found)._replace(largest=max(place.largest for place in found))


def _unequal(
    left: NDArray[Any], right: NDArray[Any], *, atol: float, rtol: float
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return where two arrays of one shape differ beyond the tolerances, and by how much.

    NaN against a number is inf.
    """
    exact = _equal(left, right)
    if bool(exact.all()):
        return ~exact, np.zeros(left.shape)
    a, b = left.astype(np.float64), right.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(a - b)
        limit = atol + rtol * np.maximum(np.abs(a), np.abs(b))
    if left.dtype == right.dtype and left.dtype.kind in "iu":
        # Modulo 2**64 the difference of the larger and the smaller is exact.
        distance = (
            np.maximum(left, right).astype(np.uint64) - np.minimum(left, right).astype(np.uint64)
        ).astype(np.float64)
    distance = np.where(exact, 0.0, np.where(np.isnan(distance), np.inf, distance))
    close = exact | (distance <= np.where(np.isfinite(limit), limit, 0.0))
    if left.dtype.kind != "f" or right.dtype.kind != "f":
        close = exact
    # Whole numbers of two types beyond 2**53 may have distance 0 in float64 and still differ.
    return ~close, np.where(~close & (distance == 0), 1.0, distance)


def _equal(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_]:
    """Say where two arrays hold the same number, or NaN, whatever their types.

    Int64 2**53 + 1 and float64 2.0**53 differ, though a cast to float64 makes them one.
    """
    if left.dtype.kind == "f" and right.dtype.kind == "f":
        return np.asarray((left == right) | (np.isnan(left) & np.isnan(right)))
    if left.dtype.kind in "biu" and right.dtype.kind in "biu":
        # Bits alone would take 2**64 - 1 for -1.
        signs = [values.dtype.kind == "i" and values < 0 for values in (left, right)]
        return np.asarray(
            (left.astype(np.uint64) == right.astype(np.uint64))
            & (np.asarray(signs[0]) == np.asarray(signs[1]))
        )
    whole, real = (left, right) if right.dtype.kind == "f" else (right, left)
    if whole.dtype.kind == "b":
        return np.asarray(left == right)
    limits = np.iinfo(whole.dtype)
    inside = (
        (real >= float(limits.min)) & (real < float(int(limits.max) + 1)) & (real == np.trunc(real))
    )
    return np.asarray(inside & (np.where(inside, real, 0).astype(whole.dtype) == whole))


def _valid(column: Column) -> NDArray[np.bool_]:
    return np.ones(len(column), np.bool_) if column.valid is None else column.valid


def _length(column: Column, row: int) -> str:
    item = column.item(row)
    return "missing" if item is None else f"{len(item)} values"


def _same_object(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            type(left) is type(right)
            and left.dtype == right.dtype
            and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(
            _same_object(left[key], right[key]) for key in left
        )
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(
            _same_object(a, b) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(type(left) is type(right) and left == right)


def _short(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= 80 else text[:77] + "..."
