"""How the values of a column are packed in a Parquet file: by trying what pays.

Log-probs of a trained policy, advantages that are constant over a response, and noise all ask for
something else; the first row group tells them apart. Decompressing is what a reader waits for, so
packing must earn it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_dump.columns.fields import Field

__all__ = ["Encoding", "choose_encodings", "writer_options"]

WORTH = 0.8
"""Packed values must be smaller than this part of plain ones.

Plain floats are read four times as fast, straight from the file.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """One way to pack a column."""

    dictionary: bool = False
    """Distinct values once, then their numbers."""
    named: str | None = None
    """Parquet's name of the encoding, if it is neither plain nor a dictionary."""
    compression: str = "none"
    """Codec of the pages."""


SMALL = 16 << 10
"""Bytes of values below which trying costs more than packing can save."""

PLAIN = Encoding()
DICTIONARY = Encoding(dictionary=True, compression="zstd")
SPLIT = Encoding(named="BYTE_STREAM_SPLIT", compression="zstd")
"""For floats: mantissas are noise, exponents are not; split by byte, these compress alone."""
DELTA = Encoding(named="DELTA_BINARY_PACKED")
"""For integers: as many bits as their differences need, half of 32 for random token ids."""


def choose_encodings(fields: Sequence[Field], first: Mapping[str, pa.Array]) -> dict[str, Encoding]:
    """Return the encoding of every field, chosen on the first row group.

    Args:
        fields: the columns.
        first: the arrow arrays of the first row group; empty if there is none.
    """
    return {field.name: _choose(field, first.get(field.name)) for field in fields}


def writer_options(fields: Sequence[Field], encodings: Mapping[str, Encoding]) -> dict[str, Any]:
    """Return the keywords for `pyarrow.parquet.ParquetWriter`."""
    # Parquet names the leaf of a list column, not the column.
    leaves = {
        f"{field.name}.list.element" if field.kind == "ragged" else field.name: encodings[
            field.name
        ]
        for field in fields
    }
    return {
        "compression": {leaf: encoding.compression for leaf, encoding in leaves.items()},
        "compression_level": {
            leaf: 1 for leaf, encoding in leaves.items() if encoding.compression == "zstd"
        },
        "use_dictionary": [leaf for leaf, encoding in leaves.items() if encoding.dictionary],
        "column_encoding": (
            {leaf: encoding.named for leaf, encoding in leaves.items() if encoding.named} or None
        ),
        "write_page_checksum": True,
        "write_statistics": False,
        "version": "2.6",
    }


def _choose(field: Field, array: pa.Array | None) -> Encoding:
    if field.kind in {"text", "object"} or array is None or array.nbytes < SMALL:
        return DICTIONARY
    kind = array.type.value_type if pa.types.is_list(array.type) else array.type
    if pa.types.is_boolean(kind):
        return DICTIONARY
    packed = SPLIT if pa.types.is_floating(kind) else DELTA
    tried = {encoding: _size(field, array, encoding) for encoding in (DICTIONARY, packed)}
    best = min(tried, key=lambda encoding: tried[encoding])
    return best if tried[best] < WORTH * _size(field, array, PLAIN) else PLAIN


def _size(field: Field, array: pa.Array, encoding: Encoding) -> int:
    sink = pa.BufferOutputStream()
    schema = pa.schema([pa.field(field.name, array.type, nullable=field.nullable)])
    with pq.ParquetWriter(
        sink, schema, **writer_options([field], {field.name: encoding})
    ) as writer:
        writer.write_table(pa.Table.from_arrays([array], schema=schema))
    return int(sink.getvalue().size)
