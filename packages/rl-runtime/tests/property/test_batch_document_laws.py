"""Laws of `rollout-batch.v1`: nothing is lost or changed on the way through a document, and a wrong part is always found."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_dump import RaggedArray
from rl_runtime.batch.rank_batch import Column
from rl_runtime.batch_document import columns_of_document, document_of_columns
from rl_runtime.contract import FIELDS
from rl_runtime.errors import BatchMismatchError


@st.composite
def _columns(draw: st.DrawFn) -> dict[str, Column]:
    count = draw(st.integers(0, 4))
    columns: dict[str, Column] = {}
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, unique=True)):
        dtype, ragged = FIELDS[name]
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


@given(_columns())
def test_columns_come_back_in_dtype_and_value_also_through_json(columns: dict[str, Column]) -> None:
    document, arrays = document_of_columns(columns, batch_id=3)
    texts = json.loads(
        json.dumps(
            {
                "document": document,
                "arrays": {name: array.tolist() for name, array in arrays.items()},
            }
        )
    )
    for found in (
        columns_of_document(document, arrays),
        columns_of_document(texts["document"], texts["arrays"]),
    ):
        assert list(found) == list(columns)
        for name, column in columns.items():
            ours, theirs = (
                item.values if isinstance(item, RaggedArray) else item
                for item in (column, found[name])
            )
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)


@given(_columns())
def test_a_missing_array_is_named(columns: dict[str, Column]) -> None:
    document, arrays = document_of_columns(columns, batch_id=3)
    name = next(iter(arrays))
    del arrays[name]
    with pytest.raises(BatchMismatchError, match=name):
        columns_of_document(document, arrays)


def test_a_column_of_another_dtype_or_form_is_refused() -> None:
    with pytest.raises(
        BatchMismatchError, match=r"loss_masks has dtype int64.*truncated must have one value"
    ):
        document_of_columns(
            {
                "loss_masks": RaggedArray.from_list([[1]], np.int64),
                "truncated": RaggedArray.from_list([[True]], np.bool_),
            },
            batch_id=0,
        )
