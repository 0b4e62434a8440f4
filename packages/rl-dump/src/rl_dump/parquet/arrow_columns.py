"""How columns lie in a Parquet file: arrow types, encodings, checksums.

One row per sample; ragged fields are list columns.

Invariants, each matched by a test in `tests/unit/test_parquet.py`:

- `decode(field, encode(column))` gives the column back, bit for bit;
- `checksum` depends on the values only, not on how arrow has sliced or padded them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rl_dump.columns import tagged_json
from rl_dump.columns.fields import Column, Field
from rl_dump.columns.ragged import RaggedArray
from rl_dump.errors import DumpError

__all__ = [
    "CRC_KEY",
    "HEADER_KEY",
    "arrow_schema",
    "checksum",
    "decode",
    "encode",
    "smallest_stored",
]

HEADER_KEY = "rl_dump"
"""Key of the file's metadata that holds the header as JSON."""
CRC_KEY = "rl_dump.crc32"
"""Key of the file's metadata that holds the checksum of the header, in decimal."""

_INTEGERS = ("uint8", "int8", "uint16", "int16", "int32", "uint32", "int64", "uint64")


def smallest_stored(dtype: str, low: int, high: int) -> str:
    """Return the smallest integer dtype that holds `low` to `high`, instead of a 64-bit `dtype`.

    Token ids below 151,936 held as int64: `smallest_stored("int64", 0, 151_935)` is `"int32"`.
    """
    if np.dtype(dtype).itemsize < 8:
        return dtype
    return next(
        name for name in _INTEGERS if np.iinfo(name).min <= low and high <= np.iinfo(name).max
    )


def arrow_schema(fields: Sequence[Field]) -> pa.Schema:
    """Return the arrow schema of a dump with these fields, without metadata."""
    return pa.schema(
        [pa.field(field.name, _arrow_type(field), nullable=field.nullable) for field in fields]
    )


def encode(column: Column, *, first_row: int = 0) -> pa.Array:
    """Turn a column into the arrow array that is written.

    Args:
        column: samples of one field.
        first_row: row of the first one in the file, for errors.

    Raises:
        DumpError: an object value that cannot be written as JSON, or text that UTF-8 cannot hold;
            names field and sample.
    """
    field, values = column.field, column.values
    if field.kind == "text":
        for row, text in enumerate(values, first_row):
            if text is not None:
                tagged_json.check_text(text, what=f"{field.name} of sample {row}")
        return pa.array(values, pa.string())
    if field.kind == "object":
        return pa.array(
            [
                None
                if value is None
                else tagged_json.dumps(value, what=f"{field.name} of sample {row}")
                for row, value in enumerate(values, first_row)
            ],
            pa.string(),
        )
    missing = None if column.valid is None else ~column.valid
    if not isinstance(values, RaggedArray):
        return pa.array(
            np.asarray(values).astype(field.stored, copy=False), _value_type(field), mask=missing
        )
    flat = values.values.reshape(-1).astype(field.stored, copy=False)
    offsets = values.offsets * int(np.prod(field.trailing, dtype=np.int64))
    if offsets[-1] > np.iinfo(np.int32).max:
        raise DumpError(
            f"{field.name}: {int(offsets[-1])} values in one row group; write fewer samples at a"
            " time"
        )
    mask = None if missing is None else pa.array(missing)
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)),
        pa.array(flat, _value_type(field)),
        _arrow_type(field),
        mask=mask,
    )


def decode(field: Field, array: pa.Array, *, stored: bool = False) -> Column:
    """Turn an arrow array read from a file back into a column.

    Args:
        field: what the header says of the column.
        array: the arrow array; it must have the type `arrow_schema` gives the field.
        stored: keep the dtype of the file instead of casting to the logical one.

    Raises:
        DumpError: the array has another type, or holds what the field forbids.
    """
    if array.type != _arrow_type(field):
        raise DumpError(
            f"{field.name}: the header says {_arrow_type(field)}, the file holds {array.type}"
        )
    if field.kind == "text":
        return Column(field=field, values=array.to_pylist())
    if field.kind == "object":
        texts = array.to_pylist()
        return Column(
            field=field,
            values=[
                None if text is None else tagged_json.loads(text, what=field.name) for text in texts
            ],
        )
    valid = None if array.null_count == 0 else np.asarray(array.is_valid())
    if field.kind == "scalar":
        return Column(field=field, values=_numbers(field, array, stored=stored), valid=valid)
    offsets = array.offsets.to_numpy().astype(np.int64)
    flat = _numbers(field, array.values[offsets[0] : offsets[-1]], stored=stored)
    return Column(
        field=field,
        values=RaggedArray(*_with_trailing(field, flat, offsets - offsets[0])),
        valid=valid,
    )


def checksum(array: pa.Array) -> int:
    """Return the CRC-32 of an array's lengths, missing values and numbers, whatever its slicing.

    The same values give the same number before writing and after reading: a flipped bit anywhere
    between shows.
    """
    state = zlib.crc32(np.asarray(array.is_valid()).tobytes()) if array.null_count else 0
    if pa.types.is_list(array.type):
        offsets = array.offsets.to_numpy()
        state = zlib.crc32(np.diff(offsets).astype("<i4").tobytes(), state)
        return zlib.crc32(_plain_bytes(array.values[offsets[0] : offsets[-1]]), state)
    if pa.types.is_string(array.type):
        lengths = pc.fill_null(pc.binary_length(array), 0)
        state = zlib.crc32(lengths.to_numpy(zero_copy_only=False).astype("<i4").tobytes(), state)
        return zlib.crc32(
            "".join(text for text in array.to_pylist() if text is not None).encode(), state
        )
    return zlib.crc32(_plain_bytes(array), state)


def _plain_bytes(array: pa.Array) -> Any:
    filled = (
        pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
        if array.null_count
        else array
    )
    if not len(filled):
        return b""
    values = filled.to_numpy(zero_copy_only=False)
    # As they lie in the file, whatever the byte order of this machine.
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data.cast("B")


def _value_type(field: Field) -> pa.DataType:
    return pa.from_numpy_dtype(np.dtype(field.stored))


def _arrow_type(field: Field) -> pa.DataType:
    if field.kind in {"text", "object"}:
        return pa.string()
    # Values of a sample are never missing: stating it halves what a reader does per value.
    return (
        pa.list_(pa.field("element", _value_type(field), nullable=False))
        if field.kind == "ragged"
        else _value_type(field)
    )


def _numbers(field: Field, array: pa.Array, *, stored: bool) -> NDArray[Any]:
    if array.null_count:
        array = pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values if stored else values.astype(field.numpy_dtype, copy=False)


def _with_trailing(
    field: Field, flat: NDArray[Any], offsets: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    if not field.trailing:
        return flat, offsets
    width = int(np.prod(field.trailing))
    if width <= 0 or np.any(offsets % width):
        raise DumpError(f"{field.name}: samples do not divide into items of shape {field.trailing}")
    return flat.reshape(-1, *field.trailing), offsets // width
