"""Ragged arrays: views, laying out, taking, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_dump import RaggedArray, RaggedError


def test_items_are_views_of_the_values() -> None:
    ragged = RaggedArray(np.arange(5), np.array([0, 2, 2, 5]))
    assert [item.tolist() for item in ragged] == [[0, 1], [], [2, 3, 4]]
    ragged[2][0] = 9
    assert ragged.values[2] == 9
    assert np.shares_memory(ragged[0], ragged.values)


def test_negative_indices_count_from_the_end_and_outside_is_an_index_error() -> None:
    ragged = RaggedArray.from_list([[1], [2, 3]], np.int64)
    assert ragged[-1].tolist() == [2, 3]
    with pytest.raises(IndexError, match="item 2 asked of a ragged array with 2 items"):
        ragged[2]


def test_take_copies_items_in_any_order_with_repeats() -> None:
    ragged = RaggedArray.from_list([[1, 2], [], [3]], np.int32)
    taken = ragged.take([2, 0, 1, 0])
    assert [item.tolist() for item in taken] == [[3], [1, 2], [], [1, 2]]
    assert not np.shares_memory(taken.values, ragged.values)
    assert ragged.take([]).values.dtype == np.int32
    with pytest.raises(IndexError, match="item 3"):
        ragged.take([3])


def test_trailing_dimensions_are_kept() -> None:
    ragged = RaggedArray.from_list([np.zeros((2, 3)), np.ones((0, 3)), np.ones((1, 3))], np.float32)
    assert ragged.values.shape == (3, 3)
    assert ragged.take([2])[0].tolist() == [[1, 1, 1]]


def test_len_counts_the_items_and_lengths_their_values() -> None:
    ragged = RaggedArray.from_list([[1, 2], []], np.int64)
    assert ragged.lengths.tolist() == [2, 0]
    assert len(ragged) == 2
    assert len(RaggedArray.from_list([], np.int64)) == 0


def test_equality_is_of_bits_and_dtype() -> None:
    values = [[np.nan, 1.0]]
    assert RaggedArray.from_list(values, np.float32) == RaggedArray.from_list(values, np.float32)
    assert RaggedArray.from_list([[1]], np.int32) != RaggedArray.from_list([[1]], np.int64)
    assert RaggedArray.from_list([[1], [2]], np.int32) != RaggedArray.from_list([[1, 2]], np.int32)
    assert RaggedArray.from_list([[1]], np.int32) != [[1]]


@pytest.mark.parametrize(
    ("values", "offsets", "message"),
    [
        ([1, 2], [0, 1], "from 0 to len\\(values\\) = 2, got 0 to 1"),
        ([1, 2], [1, 2], "got 1 to 2"),
        ([1, 2], [0, 2, 1, 2], "offsets decrease at item 1: 2 then 1"),
        ([1, 2], [], "at least one entry"),
        ([1, 2], [[0, 2]], "at least one entry"),
        ([1, 2], [0.0, 2.0], "float64"),
        (5, [0, 1], "at least one dimension"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(values: Any, offsets: Any, message: str) -> None:
    with pytest.raises(RaggedError, match=message):
        RaggedArray(np.array(values), np.array(offsets))


@pytest.mark.parametrize(
    ("items", "dtype", "message"),
    [
        ([[1], 2], np.int64, "item 1 is a scalar"),
        ([[300]], np.uint8, "item 0 has values from 300 to 300, outside uint8"),
        ([np.zeros((1, 2)), np.zeros((1, 3))], np.float64, "different trailing dimensions"),
    ],
)
def test_lists_that_do_not_fit_are_refused(items: Any, dtype: Any, message: str) -> None:
    with pytest.raises(RaggedError, match=message):
        RaggedArray.from_list(items, dtype)
