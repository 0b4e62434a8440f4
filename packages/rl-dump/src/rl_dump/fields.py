"""Decide what kind of column each field of a dump is, from the values a producer hands over.

Layer: records. A `Column` is a field and its values in one canonical form; the containers only ever see columns.

Invariants, each matched by a test in `tests/unit/test_fields.py`:

- a field the contract names gets the contract's dtype, exactly or not at all;
- all problems of a batch are reported in one error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from rl_dump.contract import FIELD_RULES, FieldDocument
from rl_dump.errors import DumpError
from rl_dump.ragged import RaggedArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["Column", "ColumnInput", "Field", "Form", "Kind", "alignment_problems", "build_columns", "column_of"]

Kind: TypeAlias = Literal["scalar", "ragged", "text", "object"]
Form: TypeAlias = Literal["array", "tensor", "list", "number"]
ColumnInput: TypeAlias = "np.ndarray[Any, Any] | RaggedArray | Sequence[Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Describe one column; the keys of `contract.FieldDocument`, with the name.

    Example: `Field(name="tokens", kind="ragged", dtype="int64", stored="int32")`.
    """

    name: str
    """Name of the column."""
    kind: Kind
    """`scalar`, `ragged`, `text` or `object` (tagged JSON)."""
    dtype: str
    """Logical dtype: what reading gives back. `bfloat16` is given as float32."""
    stored: str
    """Dtype in the file."""
    trailing: tuple[int, ...] = ()
    """Dimensions after the ragged one."""
    nullable: bool = False
    """Whether some samples have no value."""
    response_aligned: bool = False
    """Whether there is one value per response token."""
    form: Form = "array"
    """What the producer held per sample."""

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the arrays a reader hands out; bfloat16 is float32."""
        return np.dtype(np.float32) if self.dtype == "bfloat16" else np.dtype(self.dtype)

    def to_document(self) -> FieldDocument:
        """Return the field as it stands in a dump's header, under its name."""
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "stored": self.stored,
            "trailing": list(self.trailing),
            "nullable": self.nullable,
            "response_aligned": self.response_aligned,
            "form": self.form,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """Hold one field's values for a run of samples."""

    field: Field
    """What the column is."""
    values: NDArray[Any] | RaggedArray | list[Any]
    """scalar: array [N]; ragged: RaggedArray of N items; text and object: list of N values, None where there is none."""
    valid: NDArray[np.bool_] | None = None
    """bool [N], False where a scalar or ragged value is missing (0 or empty there); None if none is missing."""

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.values)

    def take(self, rows: NDArray[np.int64]) -> Column:
        """Copy the samples at `rows` [k], in that order."""
        if isinstance(self.values, RaggedArray):
            values: Any = self.values.take(rows)
        elif isinstance(self.values, list):
            values = [self.values[row] for row in rows]
        else:
            values = self.values[rows]
        return replace(self, values=values, valid=None if self.valid is None else self.valid[rows])

    def item(self, row: int) -> Any:
        """Return one sample's value: numpy scalar as a Python number, ragged item as an array, None where missing."""
        if self.valid is not None and not self.valid[row]:
            return None
        value = self.values[row]
        return value.item() if self.field.kind == "scalar" else value

    def plain(self) -> NDArray[Any] | RaggedArray | list[Any]:
        """Return the values as a caller hands them over: array or ragged array, or a list with None where something is missing."""
        if self.valid is None or bool(self.valid.all()):
            return self.values
        return [self.item(row) for row in range(len(self))]


def build_columns(
    columns: Mapping[str, ColumnInput],
    *,
    response_fields: Iterable[str],
    dtypes: Mapping[str, str] | None = None,
    forms: Mapping[str, Form] | None = None,
) -> dict[str, Column]:
    """Bring a producer's columns into canonical form and check that they belong together.

    Args:
        columns: per field an array [N] or [N, ...], a `RaggedArray` of N items, or a list of N values.
        response_fields: names of the fields with one value per response token.
        dtypes: logical dtype of fields whose numpy dtype does not say it (`bfloat16` held as float32).
        forms: what the producer held per sample, for conversions.

    Returns:
        The columns by name, in the order given.

    Raises:
        DumpError: names every field that does not fit: dtype, number of samples, length against `total_lengths` or `response_lengths`.
    """
    registry = frozenset(response_fields)
    built: dict[str, Column] = {}
    problems: list[str] = []
    for name, values in columns.items():
        try:
            column = column_of(name, values, dtype=(dtypes or {}).get(name), form=(forms or {}).get(name))
        except DumpError as error:
            problems.append(str(error))
            continue
        built[name] = replace(column, field=replace(column.field, response_aligned=name in registry))
    problems += _length_problems(built) or alignment_problems(built)
    if problems:
        msg = "the columns do not make a dump:\n" + "\n".join(f"- {problem}" for problem in problems)
        raise DumpError(msg)
    return built


def column_of(name: str, values: ColumnInput, *, dtype: str | None = None, form: Form | None = None) -> Column:
    """Bring one field's values into canonical form.

    Raises:
        DumpError: the name cannot be a column, or the values cannot have the contract's dtype exactly.
    """
    if not name or "." in name or "\0" in name:
        msg = f"field name {name!r} cannot be a column: it must not be empty nor contain a dot"
        raise DumpError(msg)
    rule = FIELD_RULES.get(name)
    if rule is not None and rule.dtype == "json":
        return _object_column(name, list(values))
    if isinstance(values, np.ndarray):
        column = _array_column(name, values)
    elif isinstance(values, RaggedArray):
        column = _ragged_column(name, values, None)
    else:
        column = _list_column(name, list(values))
    if form is not None:
        column = replace(column, field=replace(column.field, form=form))
    if dtype is not None:
        return replace(column, field=replace(column.field, dtype=dtype))
    return column if rule is None else _with_contract_dtype(column, rule.dtype)


def _array_column(name: str, values: NDArray[Any]) -> Column:
    if values.dtype.kind in "OUS":
        return _list_column(name, values.tolist())
    _check_dtype(name, values.dtype)
    if values.ndim == 0:
        msg = f"{name}: a scalar is not a column; give one value per sample"
        raise DumpError(msg)
    if values.ndim == 1:
        return _scalar_column(name, values, None)
    count, width, *trailing = values.shape
    flat = RaggedArray(values.reshape(count * width, *trailing), np.arange(count + 1, dtype=np.int64) * width)
    return _ragged_column(name, flat, None)


def _list_column(name: str, items: list[Any]) -> Column:
    present = [item for item in items if item is not None]
    valid = None if len(present) == len(items) else np.array([item is not None for item in items])
    if not present:
        rule = FIELD_RULES.get(name)
        if rule is None or rule.shape != "[]" or rule.dtype == "string":
            return _object_column(name, items)
        return _scalar_column(name, np.zeros(len(items), rule.dtype), valid)
    if all(isinstance(item, str) for item in present):
        field = Field(name=name, kind="text", dtype="string", stored="string", nullable=valid is not None)
        return Column(field=field, values=items)
    numbers = _numbers(present)
    if numbers is not None:
        values = np.zeros(len(items), numbers.dtype)
        values[slice(None) if valid is None else valid] = numbers
        return _scalar_column(name, values, valid, form="number")
    ragged = _ragged_of(items)
    return _object_column(name, items) if ragged is None else _ragged_column(name, *ragged, valid=valid)


def _numbers(items: list[Any]) -> NDArray[Any] | None:
    for kinds, dtype in (((bool, np.bool_), np.bool_), ((int, np.integer), np.int64), ((float, np.floating), np.float64)):
        if all(isinstance(item, kinds) and (kinds[0] is bool or not isinstance(item, bool)) for item in items):
            try:
                return np.array(items, dtype)
            except OverflowError:
                return None
    if all(isinstance(item, (int, float, np.integer, np.floating)) and not isinstance(item, bool) for item in items):
        return np.array(items, np.float64)
    return None


def _ragged_of(items: list[Any]) -> tuple[RaggedArray, Form] | None:
    """Lay out a list whose values are all arrays, or all lists of numbers, of one dtype; None if they are not."""
    present = [item for item in items if item is not None]
    form: Form = "array" if isinstance(present[0], np.ndarray) else "list"
    if form == "list":
        if not all(isinstance(item, list) for item in present):
            return None
        arrays = [np.zeros(0, np.int64) if not item else _numbers(item) for item in present]
        dtypes = {array.dtype for array, item in zip(arrays, present, strict=True) if array is not None and item}
    else:
        arrays = [item if isinstance(item, np.ndarray) else None for item in present]
        dtypes = {array.dtype for array in arrays if array is not None}
    if any(array is None or array.ndim == 0 for array in arrays) or len(dtypes) > 1:
        return None
    dtype = next(iter(dtypes), np.dtype(np.int64))
    if dtype.kind not in "iufb":
        return None
    filled = iter(arrays)
    trailing = next((array.shape[1:] for array in arrays if array is not None), ())
    if any(array is not None and array.size and array.shape[1:] != trailing for array in arrays):
        return None
    empty = np.zeros((0, *trailing), dtype)
    return RaggedArray.from_list([empty if item is None else next(filled) for item in items], dtype), form  # type: ignore[misc]


def _scalar_column(name: str, values: NDArray[Any], valid: NDArray[np.bool_] | None, form: Form = "array") -> Column:
    dtype = values.dtype.name
    field = Field(name=name, kind="scalar", dtype=dtype, stored=_stored(dtype), nullable=valid is not None, form=form)
    return Column(field=field, values=values, valid=valid)


def _ragged_column(name: str, values: RaggedArray, form: Form | None, *, valid: NDArray[np.bool_] | None = None) -> Column:
    _check_dtype(name, values.dtype)
    field = Field(
        name=name,
        kind="ragged",
        dtype=values.dtype.name,
        stored=_stored(values.dtype.name),
        trailing=tuple(values.values.shape[1:]),
        nullable=valid is not None,
        form=form or "array",
    )
    return Column(field=field, values=values, valid=valid)


def _object_column(name: str, items: list[Any]) -> Column:
    field = Field(name=name, kind="object", dtype="json", stored="string", nullable=any(item is None for item in items))
    return Column(field=field, values=items)


def _check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "iufb" or dtype.itemsize > 8:
        msg = f"{name}: dtype {dtype} cannot be stored; use bool, integers up to 64 bits or float16/32/64"
        raise DumpError(msg)


def _stored(dtype: str) -> str:
    # Few readers of Parquet know half floats; float32 holds every value of both half formats.
    return "float32" if dtype in {"float16", "bfloat16"} else dtype


def _with_contract_dtype(column: Column, dtype: str) -> Column:
    field = column.field
    if dtype == "string" or field.kind in {"text", "object"}:
        empty = field.kind == "object" and all(item is None for item in column.values)
        if empty or (field.kind == "text") == (dtype == "string"):
            return column
        msg = f"{field.name}: the contract says {dtype}, got {'strings' if field.kind == 'text' else 'values of other types'}"
        raise DumpError(msg)
    if dtype == "float":
        dtype = field.dtype if np.dtype(field.dtype).kind == "f" and field.form != "list" else "float32"
    flat = column.values.values if isinstance(column.values, RaggedArray) else np.asarray(column.values)
    cast = _exact_cast(field, flat, np.dtype(dtype))
    values = RaggedArray(cast, column.values.offsets) if isinstance(column.values, RaggedArray) else cast
    return replace(column, field=replace(field, dtype=dtype, stored=_stored(dtype)), values=values)


def _exact_cast(field: Field, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if values.dtype == dtype:
        return values
    if dtype.kind in "iub" and values.dtype.kind in "iub":
        cast = values.astype(dtype)
        if not np.array_equal(cast, values):
            msg = f"{field.name}: values from {values.min()} to {values.max()} do not fit the contract's {dtype}"
            raise DumpError(msg)
        return cast
    if dtype.kind == "f" and values.dtype.kind in "iuf":
        return values.astype(dtype)
    msg = f"{field.name}: the contract says {dtype}, got {values.dtype}"
    raise DumpError(msg)


def _length_problems(columns: Mapping[str, Column]) -> list[str]:
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) <= 1:
        return []
    groups: dict[int, list[str]] = {}
    for name, count in counts.items():
        groups.setdefault(count, []).append(name)
    return ["fields hold different numbers of samples: " + "; ".join(f"{count} in {', '.join(names)}" for count, names in groups.items())]


def alignment_problems(columns: Mapping[str, Column]) -> list[str]:
    """List every field whose lengths contradict `total_lengths`, `response_lengths` or its own kept-set offsets, one sentence each."""
    problems = []
    expected = {name: columns[name].values for name in ("total_lengths", "response_lengths") if name in columns}
    for name, column in columns.items():
        rule = FIELD_RULES.get(name)
        shape = "[R]" if column.field.response_aligned else (rule.shape if rule else "[]")
        if not isinstance(column.values, RaggedArray):
            if shape != "[]" and column.field.kind != "object":
                problems.append(f"{name}: must hold {shape} values per sample, got one per sample")
            continue
        lengths_name, extra = {"[L]": ("total_lengths", 0), "[R]": ("response_lengths", 0), "[R+1]": ("response_lengths", 1)}.get(shape, ("", 0))
        if lengths_name in expected:
            problems += _misaligned(column, np.asarray(expected[lengths_name]) + extra, f"{lengths_name}{' + 1' if extra else ''}")
    return problems + _kept_set_problems(columns)


def _misaligned(column: Column, lengths: NDArray[np.int64], name: str) -> list[str]:
    assert isinstance(column.values, RaggedArray)
    wrong = column.values.lengths != lengths
    if column.valid is not None:
        wrong &= column.valid
    at = np.flatnonzero(wrong)
    if not at.size:
        return []
    row = int(at[0])
    return [f"{column.field.name}: sample {row} has {int(column.values.lengths[row])} values, {name} says {int(lengths[row])} ({at.size} samples differ)"]


def _kept_set_problems(columns: Mapping[str, Column]) -> list[str]:
    offsets, ids = columns.get("nucleus_offsets"), columns.get("nucleus_ids")
    if offsets is None or ids is None or not isinstance(offsets.values, RaggedArray) or not isinstance(ids.values, RaggedArray):
        return []
    ends = np.array([item[-1] if len(item) else 0 for item in offsets.values], np.int64)
    return _misaligned(ids, ends, "the last of nucleus_offsets")
