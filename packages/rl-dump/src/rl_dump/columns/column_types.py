"""What kind of column each field of a dump is, from the values a producer hands over.

Invariants, each matched by a test in `tests/unit/test_column_types.py`:

- a field the contract names gets the contract's dtype, exactly or not at all;
- all problems of a batch are reported in one error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_dump.columns.alignment import alignment_problems, count_problems
from rl_dump.columns.fields import Column, ColumnInput, Field, stored_dtype
from rl_dump.columns.ragged import RaggedArray
from rl_dump.contract import FIELD_RULES, Form, Kind
from rl_dump.errors import DumpError

__all__ = ["build_columns", "column_of", "contract_column", "number_column"]

_EXACT_INTEGERS = 1 << 53
"""Beyond this, float64 skips whole numbers."""


def build_columns(
    columns: Mapping[str, ColumnInput],
    *,
    response_fields: Iterable[str],
    dtypes: Mapping[str, str] | None = None,
) -> dict[str, Column]:
    """Bring a producer's columns into canonical form and check that they belong together.

    Args:
        columns: per field an array [N] or [N, ...], a `RaggedArray` of N items, or a list of N
            values.
        response_fields: names of the fields with one value per response token.
        dtypes: logical dtype of fields whose numpy dtype does not say it (`bfloat16` held as
            float32).

    Returns:
        The columns by name, in the order given.

    Raises:
        DumpError: names every field that does not fit: dtype, number of samples, length against
            `total_lengths` or `response_lengths`.
    """
    registry = frozenset(response_fields)
    built: dict[str, Column] = {}
    problems: list[str] = []
    for name, values in columns.items():
        try:
            column = column_of(name, values, dtype=(dtypes or {}).get(name))
        except DumpError as error:
            problems.append(str(error))
            continue
        built[name] = replace(
            column, field=replace(column.field, response_aligned=name in registry)
        )
    problems += count_problems(built) or alignment_problems(built)
    if problems:
        raise DumpError(
            "the columns do not make a dump:\n" + "\n".join(f"- {problem}" for problem in problems)
        )
    return built


def column_of(
    name: str,
    values: ColumnInput,
    *,
    dtype: str | None = None,
    strict: bool = True,
) -> Column:
    """Bring one field's values into canonical form.

    Args:
        name: the field.
        values: an array [N] or [N, ...], a `RaggedArray` of N items, or a list of N values.
        dtype: the logical dtype if the values' own does not say it.
        strict: refuse values that do not have the contract's type; False keeps them as they are.

    Raises:
        DumpError: the name cannot be a column, or (strict) the values cannot have the contract's
            dtype exactly.
    """
    if (
        not name
        or "." in name
        or "\0" in name
        or any("\ud800" <= mark <= "\udfff" for mark in name)
    ):
        raise DumpError(
            f"field name {name!r} cannot be a column: it must not be empty nor contain a dot or a"
            " lone surrogate"
        )
    rule = FIELD_RULES.get(name)
    if isinstance(values, np.ndarray):
        column = _array_column(name, values)
    elif isinstance(values, RaggedArray):
        column = number_column(name, values, "tensor")
    elif isinstance(values, (list, tuple)):
        column = _list_column(name, list(values))
    else:
        raise DumpError(
            f"{name}: a {type(values).__name__} is not a column; give an array, a RaggedArray or a"
            " list with one value per sample"
        )
    if dtype is not None:
        return replace(column, field=replace(column.field, dtype=dtype))
    return column if rule is None else contract_column(column, strict=strict)


def _array_column(name: str, values: NDArray[Any]) -> Column:
    if values.dtype.kind in "OUS":
        return _list_column(name, values.tolist())
    if values.ndim == 0:
        raise DumpError(f"{name}: a scalar is not a column; give one value per sample")
    if values.ndim == 1:
        return number_column(name, values, "number")
    count, width, *trailing = values.shape
    flat = RaggedArray(
        values.reshape(count * width, *trailing), np.arange(count + 1, dtype=np.int64) * width
    )
    return number_column(name, flat, "tensor")


def _list_column(name: str, items: list[Any]) -> Column:
    rule = FIELD_RULES.get(name)
    present = [item for item in items if item is not None]
    valid = None if len(present) == len(items) else np.array([item is not None for item in items])
    if rule is not None and rule.dtype == "json":
        return _list_of(name, items)
    if not present:
        return _empty_column(name, items, valid)
    if all(isinstance(item, str) for item in present):
        return _list_of(name, items, "text", "string")
    numbers = _numbers(present)
    if numbers is not None:
        values = np.zeros(len(items), numbers.dtype)
        values[slice(None) if valid is None else valid] = numbers
        generic = all(isinstance(item, np.generic) for item in present)
        return number_column(name, values, "generic" if generic else "number", valid=valid)
    ragged = _ragged_of(items, present)
    return _list_of(name, items) if ragged is None else number_column(name, *ragged, valid=valid)


def _empty_column(name: str, items: list[Any], valid: NDArray[np.bool_] | None) -> Column:
    rule = FIELD_RULES.get(name)
    if rule is None or rule.shape != "[]" or rule.dtype == "string":
        return _list_of(name, items)
    return number_column(name, np.zeros(len(items), rule.dtype), "number", valid=valid)


def _numbers(items: list[Any]) -> NDArray[Any] | None:
    """Return a list of numbers as an array, None if it holds anything else or would lose digits."""
    types = set(map(type, items))
    if types in ({bool}, {float}):
        return np.array(items)
    if types <= {int, float}:
        whole = [item for item in items if type(item) is int]
        if types == {int} and all(-(1 << 63) <= item < 1 << 63 for item in whole):
            return np.array(items, np.int64)
        exact = all(abs(item) <= _EXACT_INTEGERS for item in whole)
        return np.array(items, np.float64) if exact else None
    if len(types) == 1 and isinstance(items[0], np.generic) and items[0].dtype.kind in "iufb":
        return np.array(items, items[0].dtype)
    return None


def _ragged_of(items: list[Any], present: list[Any]) -> tuple[RaggedArray, Form] | None:
    """Lay out a list whose values are all arrays, or all lists of numbers; None if they are not."""
    arrays: list[NDArray[Any]] = []
    lists = isinstance(present[0], list)
    for item in present:
        array = _list_array(item) if lists and isinstance(item, list) else item
        if not isinstance(array, np.ndarray) or array.ndim == 0 or array.dtype.kind not in "iufb":
            return None
        arrays.append(array)
    # An empty list has no dtype of its own.
    dtypes = {array.dtype for array in arrays if len(array) or not lists} or {np.dtype(np.int64)}
    if dtypes == {np.dtype(np.int64), np.dtype(np.float64)} and lists:
        dtypes = {np.dtype(np.float64)}
    trailing = {array.shape[1:] for array in arrays}
    if len(dtypes) > 1 or len(trailing) > 1:
        return None
    dtype, filled = dtypes.pop(), iter(arrays)
    empty = np.zeros((0, *trailing.pop()), dtype)
    laid = RaggedArray.from_list([empty if item is None else next(filled) for item in items], dtype)
    return laid, "list" if lists else "tensor"


def _list_array(item: list[Any]) -> NDArray[Any] | None:
    return _numbers(item) if item else np.zeros(0, np.int64)


def number_column(
    name: str,
    values: NDArray[Any] | RaggedArray,
    form: Form,
    *,
    valid: NDArray[np.bool_] | None = None,
) -> Column:
    """Make a column of numbers.

    Args:
        name: the field.
        values: array [N] for one number per sample, a ragged array of N items for an array of them.
        form: what the producer held per sample.
        valid: bool [N], False where there is no value; None if there always is.

    Raises:
        DumpError: the dtype cannot be stored.
    """
    if values.dtype.kind not in "iufb" or values.dtype.itemsize > 8:
        raise DumpError(
            f"{name}: dtype {values.dtype} cannot be stored; use bool, integers up to 64 bits or"
            " float16/32/64"
        )
    field = Field(
        name=name,
        kind="ragged" if isinstance(values, RaggedArray) else "scalar",
        dtype=values.dtype.name,
        stored=stored_dtype(values.dtype.name),
        trailing=tuple(values.values.shape[1:]) if isinstance(values, RaggedArray) else (),
        nullable=valid is not None,
        form=form,
    )
    return Column(field=field, values=values, valid=valid)


def _list_of(name: str, items: list[Any], kind: Kind = "object", dtype: str = "json") -> Column:
    nullable = any(item is None for item in items)
    field = Field(name=name, kind=kind, dtype=dtype, stored="string", nullable=nullable)
    return Column(field=field, values=items)


def contract_column(column: Column, *, strict: bool = True) -> Column:
    """Give a column the dtype the contract fixes for its field.

    Args:
        column: a column of any field; of one that the contract does not name, it comes back as it
            is.
        strict: refuse values of another type; False keeps them as they are.

    Raises:
        DumpError: (strict) the values cannot have the contract's dtype exactly.
    """
    rule = FIELD_RULES.get(column.field.name)
    empty = isinstance(column.values, list) and all(value is None for value in column.values)
    if rule is None or rule.dtype == "json" or empty:
        return column
    try:
        return _with_dtype(column, rule.dtype)
    except DumpError:
        if strict:
            raise
        return column


def _with_dtype(column: Column, dtype: str) -> Column:
    field = column.field
    if dtype == "string" and field.kind == "text":
        return column
    if dtype == "string":
        raise DumpError(f"{field.name}: the contract says string, got {field.dtype}")
    if isinstance(column.values, list):
        raise DumpError(
            f"{field.name}: the contract says {dtype}, got"
            f" {'strings' if field.kind == 'text' else 'values of mixed types'}"
        )
    flat = column.values.values if isinstance(column.values, RaggedArray) else column.values
    if dtype == "float":
        dtype = _float_dtype(flat, field)
    cast = _exact_cast(field, flat, np.dtype(dtype))
    values = (
        RaggedArray(cast, column.values.offsets) if isinstance(column.values, RaggedArray) else cast
    )
    return replace(
        column, field=replace(field, dtype=dtype, stored=stored_dtype(dtype)), values=values
    )


def _float_dtype(values: NDArray[Any], field: Field) -> str:
    """Keep an array's own float dtype; Python numbers become float32 if that loses nothing."""
    if values.dtype.kind == "f" and field.form != "list":
        return field.dtype
    return (
        "float32"
        if np.array_equal(values.astype(np.float32).astype(np.float64), values, equal_nan=True)
        else "float64"
    )


def _exact_cast(field: Field, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if values.dtype == dtype:
        return values
    if dtype.kind in "iub" and values.dtype.kind in "iub":
        cast = values.astype(dtype)
        if not np.array_equal(cast, values):
            raise DumpError(
                f"{field.name}: values from {values.min()} to {values.max()} do not fit the"
                f" contract's {dtype}"
            )
        return cast
    if dtype.kind == "f" and values.dtype.kind in "iuf":
        return values.astype(dtype)
    raise DumpError(f"{field.name}: the contract says {dtype}, got {values.dtype}")
