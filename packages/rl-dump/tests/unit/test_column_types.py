"""Which column each kind of value becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stubs.dump_batches import ragged

from rl_dump import DumpError
from rl_dump.columns.column_types import build_columns, column_of


@pytest.mark.parametrize(
    ("values", "kind", "dtype", "form"),
    [
        (np.array([1, 2], np.int16), "scalar", "int16", "number"),
        ([1, 2], "scalar", "int64", "number"),
        ([1.5, 2], "scalar", "float64", "number"),
        ([True, None], "scalar", "bool", "number"),
        ([np.float32(1), np.float32(2)], "scalar", "float32", "generic"),
        (["a", None], "text", "string", "plain"),
        (np.array(["a", "b"]), "text", "string", "plain"),
        ([[1], []], "ragged", "int64", "list"),
        ([[], []], "ragged", "int64", "list"),
        ([[1], [0.5]], "ragged", "float64", "list"),
        ([np.zeros(1, np.float32), None], "ragged", "float32", "tensor"),
        (ragged([[1]], np.uint8), "ragged", "uint8", "tensor"),
        (np.zeros((2, 3)), "ragged", "float64", "tensor"),
        ([{"a": 1}, [1]], "object", "json", "plain"),
        ([1, "a"], "object", "json", "plain"),
        ([2**70], "object", "json", "plain"),
        ([2**60, 0.5], "object", "json", "plain"),
        ([np.zeros(1, np.float32), np.zeros(1, np.float64)], "object", "json", "plain"),
        ([np.zeros((1, 2)), np.zeros((1, 3))], "object", "json", "plain"),
        ([[1], ["a"]], "object", "json", "plain"),
        ([None, None], "object", "json", "plain"),
        ([], "object", "json", "plain"),
    ],
)
def test_values_become_columns(values: Any, kind: str, dtype: Any, form: str) -> None:
    field = column_of("x", values).field
    assert (field.kind, field.dtype, field.form) == (kind, dtype, form)


def test_a_field_of_the_contract_gets_its_dtype_exactly() -> None:
    for name, values, dtype in (
        ("tokens", ragged([[1]], np.int16), np.int64),
        ("loss_masks", [[1, 0], [1]], np.int32),
        ("truncated", [0, 1], np.bool_),
        ("rewards", np.array([1, 2]), np.float64),
    ):
        column = column_of(name, values).values
        assert not isinstance(column, list)
        assert column.dtype == dtype
    assert column_of("sample_index", [None, None]).field.dtype == "int64"
    assert column_of("rewards", []).field.dtype == "float64"


def test_log_probs_keep_an_arrays_precision_and_lists_take_the_smallest_that_loses_nothing() -> (
    None
):
    assert column_of("log_probs", ragged([[0.1]], np.float64)).field.dtype == "float64"
    assert column_of("log_probs", ragged([[0.1]], np.float16)).field.dtype == "float16"
    assert column_of("log_probs", [[0.5, -0.25], []]).field.dtype == "float32"
    assert column_of("log_probs", [[0.1]]).field.dtype == "float64"
    assert column_of("log_probs", [[1, 2]]).field.dtype == "float32"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("truncated", [2, 3], "do not fit the contract's bool"),
        (
            "nucleus_status",
            ragged([[256]], np.int64),
            "values from 256 to 256 do not fit the contract's uint8",
        ),
        ("tokens", ragged([[0.5]], np.float32), "the contract says int64, got float32"),
        ("rewards", ["a"], "the contract says float64, got strings"),
        ("rewards", [1, "a"], "the contract says float64, got values of mixed types"),
        ("finish_reason", [1], "the contract says string, got int64"),
        ("", [1], "cannot be a column"),
        ("a.b", [1], "cannot be a column"),
        ("x", np.array(3), "a scalar is not a column"),
        ("x", {"a": 1}, "a dict is not a column"),
        ("x", np.array([1 + 2j]), "dtype complex128 cannot be stored"),
        ("x", np.array(["2020-01-01"], "datetime64[D]"), "cannot be stored"),
    ],
)
def test_values_that_fit_no_column_are_refused(name: str, values: Any, message: str) -> None:
    with pytest.raises(DumpError, match=message):
        column_of(name, values)


def test_without_strictness_other_types_are_kept() -> None:
    assert column_of("rewards", ["a"], strict=False).field.kind == "text"
    assert column_of("truncated", [2], strict=False).field.dtype == "int64"


def test_fields_the_contract_holds_as_json_stay_objects() -> None:
    assert column_of("label", ["a", "b"]).field.kind == "object"
    assert column_of("metadata", [{}, None]).field.kind == "object"


def test_half_precision_without_a_numpy_name_is_stated_by_the_caller() -> None:
    column = build_columns(
        {"x": ragged([[1.5]], np.float32)}, response_fields=(), dtypes={"x": "bfloat16"}
    )["x"]
    assert (column.field.dtype, column.field.stored) == ("bfloat16", "float32")
    assert column.field.numpy_dtype == np.float32
