"""Laws of `take_columns`: picks of a partition, put together, are the whole in every column."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_dump import RaggedArray
from rl_runtime.batch.columns import COLUMN_TYPES, column_problem
from rl_runtime.batch.rank_batch import Column, take_columns


@st.composite
def _columns(draw: st.DrawFn) -> dict[str, Column]:
    count = draw(st.integers(0, 6))
    columns: dict[str, Column] = {}
    for name in draw(st.lists(st.sampled_from(sorted(COLUMN_TYPES)), min_size=1, unique=True)):
        dtype, ragged = COLUMN_TYPES[name]
        lengths = [draw(st.integers(0, 3)) for _ in range(count)] if ragged else [1] * count
        flat = np.array(
            [draw(st.integers(0, 1 if dtype == "bool" else 100)) for _ in range(sum(lengths))],
            dtype,
        )
        columns[name] = (
            RaggedArray(flat, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
            if ragged
            else flat
        )
    return columns


def _items(column: Column) -> list[list[object]]:
    return [np.atleast_1d(item).tolist() for item in column]


@given(_columns(), st.data())
def test_the_shares_of_a_partition_are_the_whole_in_every_column(
    columns: dict[str, Column], data: st.DataObject
) -> None:
    count = len(next(iter(columns.values())))
    order = np.array(data.draw(st.permutations(range(count))), np.int64)
    cut = data.draw(st.integers(0, count))
    shares = [take_columns(columns, order[:cut]), take_columns(columns, order[cut:])]
    for name, column in columns.items():
        whole = _items(column)
        taken = [item for share in shares for item in _items(share[name])]
        assert taken == [whole[position] for position in order]


@given(_columns())
def test_a_pick_keeps_every_columns_type(columns: dict[str, Column]) -> None:
    picked = take_columns(columns, np.zeros(0, np.int64))
    assert list(picked) == list(columns)
    assert [column_problem(name, column) for name, column in picked.items()] == [None] * len(
        columns
    )
