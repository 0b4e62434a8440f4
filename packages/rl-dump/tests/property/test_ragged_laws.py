"""Laws of ragged arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_dump import RaggedArray

items = st.lists(st.lists(st.integers(-1000, 1000), max_size=6), max_size=8)


@given(items)
def test_from_list_of_its_items_is_the_ragged_array(values: list[list[int]]) -> None:
    ragged = RaggedArray.from_list(values, np.int64)
    assert [item.tolist() for item in ragged] == values
    assert RaggedArray.from_list(list(ragged), ragged.dtype) == ragged


@given(items, st.data())
def test_take_composes(values: list[list[int]], data: st.DataObject) -> None:
    ragged = RaggedArray.from_list(values, np.int32)
    index = st.lists(st.integers(0, len(values) - 1), max_size=6) if values else st.just([])
    first = data.draw(index)
    second = data.draw(
        st.lists(st.integers(0, len(first) - 1), max_size=6) if first else st.just([])
    )
    assert ragged.take(first).take(second) == ragged.take([first[at] for at in second])
