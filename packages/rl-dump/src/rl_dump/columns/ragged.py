"""How variable-length columns are held: one flat array and its offsets.

Invariants, each matched by a test in `tests/unit/test_ragged.py` and
`tests/property/test_ragged_laws.py`:

- `offsets` is int64, starts at 0, never decreases and ends at `len(values)`;
- item `i` is `values[offsets[i]:offsets[i + 1]]`, a view: reading an item copies nothing;
- `RaggedArray.from_list(list(ragged), ragged.dtype)` equals `ragged`.

Axes: N items (samples), R_i values of item i, T values of all items end to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rl_dump.errors import RaggedError

__all__ = ["RaggedArray"]


@dataclass(frozen=True, slots=True, eq=False)
class RaggedArray:
    """One array per sample, end to end.

    Three samples with 2, 0 and 1 tokens: `RaggedArray(np.array([7, 8, 9]), np.array([0, 2, 2,
    3]))`.

    Raises:
        RaggedError: `offsets` are not int64-compatible, do not start at 0, decrease, or do not end
            at `len(values)`.
    """

    values: NDArray[Any]
    """All items end to end: [total, ...], any numpy dtype.

    Trailing dimensions are the same for every item.
    """
    offsets: NDArray[np.int64]
    """Start of every item and the end of the last one: int64 [num_items + 1], `offsets[0] == 0`."""

    def __post_init__(self) -> None:
        values = np.asarray(self.values)
        given = np.asarray(self.offsets)
        if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
            raise RaggedError(
                "offsets must be integers [num_items + 1] with at least one entry, got"
                f" {given.dtype} {list(given.shape)}"
            )
        offsets = given.astype(np.int64, copy=False)
        if values.ndim == 0:
            raise RaggedError(
                "values must have at least one dimension, got a scalar; pass"
                " `np.atleast_1d(values)`"
            )
        if offsets[0] != 0 or offsets[-1] != len(values):
            raise RaggedError(
                f"offsets must run from 0 to len(values) = {len(values)}, got {int(offsets[0])} to"
                f" {int(offsets[-1])}"
            )
        falls = np.flatnonzero(np.diff(offsets) < 0)
        if falls.size:
            at = int(falls[0])
            raise RaggedError(
                f"offsets decrease at item {at}: {int(offsets[at])} then {int(offsets[at + 1])}"
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "offsets", offsets)

    @classmethod
    def from_list(cls, arrays: Iterable[ArrayLike], dtype: DTypeLike) -> RaggedArray:
        """Lay a list of arrays end to end.

        Args:
            arrays: one array [length_i, ...] per item, of any length including 0; trailing
                dimensions agree.
            dtype: dtype of the result's values. Values that do not fit an integer dtype are an
                error, never wrapped.

        Returns:
            The ragged array; `from_list([[1, 2], []], np.int32)` has values [1, 2] and offsets [0,
            2, 2].

        Raises:
            RaggedError: an item is a scalar, has other trailing dimensions, or does not fit
                `dtype`.
        """
        target = np.dtype(dtype)
        items = [_item(index, array, target) for index, array in enumerate(arrays)]
        shapes = {item.shape[1:] for item in items if item.size} or {
            item.shape[1:] for item in items
        }
        if len(shapes) > 1:
            raise RaggedError(
                f"items have different trailing dimensions: {sorted(shapes)}; a ragged array is"
                " ragged in its first dimension only"
            )
        trailing = next(iter(shapes), ())
        offsets = _offsets_of(np.array([len(item) for item in items], np.int64))
        values = np.empty((int(offsets[-1]), *trailing), target)
        for item, start, stop in zip(items, offsets[:-1], offsets[1:], strict=True):
            if stop > start:
                values[start:stop] = item
        return cls(values, offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of every item: int64 [num_items]."""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.values.dtype

    def __len__(self) -> int:
        """Count the items (not the values)."""
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Return item `index` as a view [length, ...]; negative indices count from the end.

        Raises:
            IndexError: there is no such item.
        """
        count = len(self)
        position = index + count if index < 0 else index
        if not 0 <= position < count:
            raise IndexError(f"item {index} asked of a ragged array with {count} items")
        return self.values[self.offsets[position] : self.offsets[position + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Yield every item as a view, in order."""
        bounds = self.offsets.tolist()
        for start, stop in pairwise(bounds):
            yield self.values[start:stop]

    def __eq__(self, other: object) -> bool:
        """Say whether dtype, lengths and values are the same; NaN equals NaN of the same bits."""
        if not isinstance(other, RaggedArray):
            return NotImplemented
        return (
            self.values.dtype == other.values.dtype
            and self.values.shape == other.values.shape
            and np.array_equal(self.offsets, other.offsets)
            and self.values.tobytes() == other.values.tobytes()
        )

    __hash__ = None  # type: ignore[assignment]

    def take(self, indices: ArrayLike) -> RaggedArray:
        """Copy the items at `indices`, in that order.

        Args:
            indices: integers [k], 0-based, repeats allowed.

        Returns:
            A ragged array of k items with its own memory.

        Raises:
            IndexError: an index is outside [0, num_items).
        """
        chosen = np.asarray(indices, np.int64).reshape(-1)
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if outside.size:
            raise IndexError(
                f"item {int(outside[0])} asked of a ragged array with {len(self)} items"
            )
        lengths = self.lengths[chosen]
        offsets = _offsets_of(lengths)
        # Row of each output value: the item's start, plus how far into the item it is.
        shift = np.repeat(self.offsets[:-1][chosen] - offsets[:-1], lengths)
        return RaggedArray(self.values[shift + np.arange(len(shift))], offsets)


def _item(index: int, array: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    item = np.asarray(array)
    if item.ndim == 0:
        raise RaggedError(f"item {index} is a scalar; every item must be an array [length, ...]")
    if item.size and item.dtype.kind in "iu" and dtype.kind in "iu":
        low, high = int(item.min()), int(item.max())
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise RaggedError(f"item {index} has values from {low} to {high}, outside {dtype}")
    return item.astype(dtype, copy=False)


def _offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
