"""Documents: what is written is read, type and bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_dump import DumpError
from rl_dump.columns import tagged_json
from rl_dump.columns.tagged_json import Tensor

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from(
        [np.float32(1.5), np.int64(-3), np.bool_(True), np.float64("nan"), np.uint8(7)]
    ),
    st.sampled_from(
        [
            np.arange(6, dtype=np.int32).reshape(2, 3),
            np.array([np.nan, 1e-40], np.float32),
            np.zeros((0, 2), np.uint16),
            np.array([True]),
        ]
    ),
    st.sampled_from(
        [
            Tensor(np.array([1.5], np.float32), "bfloat16"),
            Tensor(np.zeros((2, 0), np.int64), "int64"),
        ]
    ),
)
keys = st.one_of(
    st.text(max_size=4), st.integers(-5, 5), st.sampled_from(["$tuple", "$map", "$float", "$"])
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return bool(
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, np.generic):
        return bool(left.tobytes() == right.tobytes())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right or (left != left and right != right))


@given(values)
def test_reading_what_was_written_gives_it_back(value: object) -> None:
    assert same(tagged_json.loads(tagged_json.dumps(value)), value)


def test_a_value_inside_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(DumpError, match="does it contain itself"):
        tagged_json.dumps(loop)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.array(["a"]), np.array([None]), 1j, [lambda: 0]]
)
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(DumpError, match="cannot write"):
        tagged_json.dumps(value, what="metadata.x")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"$array": "O", "shape": [1], "values": [1]}',
        '{"$array": "int64", "shape": [3], "values": [1]}',
        '{"$bytes": "?"}',
        '{"$float": "1.0"}',
        '{"$float": "x"}',
        '{"$scalar": "float32", "data": ""}',
        '{"$map": [1]}',
        '{"$tuple": 3}',
        '{"$array": "int8", "shape": [99999999999], "data": ""}',
    ],
)
def test_a_document_this_package_did_not_write_is_an_error(text: str) -> None:
    with pytest.raises(DumpError):
        tagged_json.loads(text)
