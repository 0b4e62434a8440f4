"""How a dump gets into a Parquet file: row groups of bounded size, checksums, whole or not at all.

`write_dump` takes whole columns; `DumpWriter` takes them piece by piece, so that a producer need
never hold a batch.

Invariants, each matched by a test in `tests/unit/test_writer.py`:

- a failed write leaves the old file, or none;
- a row group holds at most `ROW_GROUP_BYTES` of values unless one sample alone is larger;
- what is read back equals what was written, dtype and bits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from typing_extensions import Self, Unpack

from rl_dump.atomic import atomic_path
from rl_dump.columns.column_types import build_columns
from rl_dump.columns.fields import Column, ColumnInput, Field
from rl_dump.columns.ragged import RaggedArray
from rl_dump.contract import RESPONSE_FIELDS, DumpHeader
from rl_dump.errors import DumpError, WriteError
from rl_dump.header import HeaderKeywords, field_of, make_header, seal_header
from rl_dump.parquet.arrow_columns import (
    CRC_KEY,
    HEADER_KEY,
    arrow_schema,
    checksum,
    encode,
    smallest_stored,
)
from rl_dump.parquet.encoding import choose_encodings, writer_options

__all__ = [
    "ROW_GROUP_BYTES",
    "DumpWriter",
    "integer_range",
    "row_bytes",
    "row_group_bounds",
    "store_smallest",
    "write_columns",
    "write_dump",
]

ROW_GROUP_BYTES = 2 << 20
"""Values per row group, in bytes before compression.

A reader of one sample decodes this much, a streaming writer holds this much.
"""


def write_dump(
    path: str | os.PathLike[str],
    *,
    columns: Mapping[str, ColumnInput],
    response_fields: Iterable[str] = RESPONSE_FIELDS,
    **header: Unpack[HeaderKeywords],
) -> Path:
    """Write one batch to a Parquet file, atomically.

    Args:
        path: where the file shall be; must end in `.parquet`. An existing file is replaced, whole.
        columns: per field an array [N], a `RaggedArray` of N items, or a list of N values (strings,
            numbers, None, JSON). Names, dtypes and lengths of the fields the contract names are
            checked; others are kept as they come.
        response_fields: names of the fields with one value per response token.
        header: `contract` (`train-dump.v2` or `rollout-dump.v1`), `batch_id`, and what else stands
            beside the samples: `dp_shards`, `schedule`, `raw_reward`, `dropped`, `writer_rank`,
            `metadata`; each is described in `rl_dump.header.HeaderKeywords`.

    Returns:
        The path written.

    Raises:
        DumpError: the columns do not make a dump; the message lists every problem.
        WriteError: the file system refused.
    """
    built = build_columns(columns, response_fields=response_fields)
    fields = [column.field for column in built.values()]
    num_samples = len(next(iter(built.values()))) if built else 0
    return write_columns(path, make_header(num_samples=num_samples, fields=fields, **header), built)


def write_columns(
    path: str | os.PathLike[str], header: DumpHeader, columns: Mapping[str, Column]
) -> Path:
    """Write columns under a header as it stands, producer and minor included.

    Args:
        path: as for `write_dump`.
        header: what goes beside the columns; `fields`, `num_samples` and `row_groups` are made
            anew.
        columns: every column, with the same number of samples.

    Raises:
        DumpError, WriteError: as for `write_dump`.
    """
    stored = {name: store_smallest(column) for name, column in columns.items()}
    fields = {name: column.field.to_document() for name, column in stored.items()}
    with DumpWriter.with_header(path, {**header, "fields": fields}) as writer:
        for start, stop in row_group_bounds(row_bytes(stored, header["num_samples"])):
            writer.write(
                {name: column.take(np.arange(start, stop)) for name, column in stored.items()}
            )
    return Path(path)


class DumpWriter:
    """A Parquet dump that is written row group by row group; a context manager.

    The file appears under its name when the block ends without an exception; otherwise nothing is
    left behind.

    Args:
        path: as for `write_dump`.
        fields: every column of the dump, with the dtype it is stored in.
        header: see `HeaderKeywords`.

    Raises:
        WriteError: the file system refused, here or in `write`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fields: Sequence[Field],
        **header: Unpack[HeaderKeywords],
    ) -> None:
        self._path = Path(path)
        if self._path.suffix != ".parquet":
            raise DumpError(
                f"{self._path}: this writer makes .parquet files; for .pt use"
                " rl_dump.torch.write_torch_archive or `rl-dump convert`"
            )
        self._header = make_header(num_samples=0, fields=fields, **header)
        self._fields = {field.name: field for field in fields}
        self._rows: list[int] = []
        self._checksums: dict[str, list[int]] = {name: [] for name in self._fields}
        self._stack = contextlib.ExitStack()
        self._temporary: Path | None = None
        self._parquet: pq.ParquetWriter | None = None

    @classmethod
    def with_header(cls, path: str | os.PathLike[str], header: DumpHeader) -> Self:
        """Return a writer for a header that exists, such as that of a dump that is converted."""
        fields = [
            field_of(name, document, where=str(path)) for name, document in header["fields"].items()
        ]
        writer = cls(path, fields=fields, contract=header["contract"], batch_id=header["batch_id"])
        writer._header = header
        return writer

    def __enter__(self) -> Self:
        """Take a temporary path.

        The file is made with the first row group, which tells how to pack it.
        """
        self._temporary = self._stack.enter_context(atomic_path(self._path))
        return self

    def write(self, columns: Mapping[str, Column]) -> None:
        """Append one row group.

        Args:
            columns: exactly the writer's fields, all with the same number of samples.

        Raises:
            DumpError: other fields, different numbers of samples, or a value that cannot be
                written, with its field and sample.
            WriteError: the file system refused.
        """
        if set(columns) != set(self._fields):
            raise DumpError(
                f"{self._path}: row group has fields {sorted(columns)}, the dump has"
                f" {sorted(self._fields)}"
            )
        self.write_arrays(
            {
                name: encode(replace(columns[name], field=field), first_row=sum(self._rows))
                for name, field in self._fields.items()
            }
        )

    def write_arrays(self, arrays: Mapping[str, pa.Array]) -> None:
        """Append one row group of arrow arrays, otherwise as `write`.

        Their types are those of `parquet.arrow_columns.arrow_schema`.
        """
        if self._temporary is None:
            raise DumpError(
                f"{self._path}: nothing can be written outside of the writer's `with` block"
            )
        rows = {len(array) for array in arrays.values()}
        if len(rows) > 1:
            raise DumpError(f"{self._path}: columns of one row group have {sorted(rows)} samples")
        if not rows or rows == {0}:
            return
        try:
            parquet = self._parquet or self._open(arrays)
            parquet.write_table(
                pa.table(dict(arrays), schema=parquet.schema), row_group_size=max(rows)
            )
        except OSError as error:
            raise WriteError(f"cannot write {self._path}: {error.strerror or error}") from error
        self._rows.append(max(rows))
        for name, array in arrays.items():
            self._checksums[name].append(checksum(array))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Seal the file and give it its name, or remove it after an exception."""
        with self._stack:
            if error is not None:
                # Re-raised inside the stack, so that the temporary path goes away instead of taking
                # its name.
                raise error
            parquet = self._parquet or self._open({})
            sealed: DumpHeader = {
                **self._header,
                "num_samples": sum(self._rows),
                "row_groups": self._rows,
                "checksums": self._checksums,
            }
            text, crc = seal_header(sealed)
            parquet.add_key_value_metadata({HEADER_KEY: text, CRC_KEY: crc})
            parquet.close()
            self._temporary = None

    def _open(self, first: Mapping[str, pa.Array]) -> pq.ParquetWriter:
        fields = list(self._fields.values())
        options = writer_options(fields, choose_encodings(fields, first))
        self._parquet = pq.ParquetWriter(self._temporary, arrow_schema(fields), **options)
        self._stack.callback(self._parquet.close)
        return self._parquet


def store_smallest(column: Column) -> Column:
    """Return the column with the smallest stored dtype for its integers.

    Other columns as they are.
    """
    span = integer_range(column)
    if span is None:
        return column
    return replace(
        column, field=replace(column.field, stored=smallest_stored(column.field.dtype, *span))
    )


def integer_range(column: Column) -> tuple[int, int] | None:
    """Return the lowest and highest value of a ragged integer column, None for any other column.

    An empty one has (0, 0).
    """
    if not isinstance(column.values, RaggedArray) or column.values.dtype.kind not in "iu":
        return None
    flat = column.values.values
    return (int(flat.min()), int(flat.max())) if flat.size else (0, 0)


def row_bytes(columns: Mapping[str, Column], rows: int) -> NDArray[np.int64]:
    """Return how many bytes of values each sample has: int64 [rows]."""
    total = np.zeros(rows, np.int64)
    for column in columns.values():
        if isinstance(column.values, RaggedArray):
            width = (
                int(np.prod(column.field.trailing, dtype=np.int64))
                * np.dtype(column.field.stored).itemsize
            )
            total += column.values.lengths * width
        elif isinstance(column.values, list):
            total += np.array(
                [len(value) if isinstance(value, str) else 64 for value in column.values], np.int64
            )
        else:
            total += 8
    return total


def row_group_bounds(
    sizes: NDArray[np.int64], limit: int = ROW_GROUP_BYTES
) -> list[tuple[int, int]]:
    """Cut samples into consecutive runs of at most `limit` bytes; a larger sample stands alone.

    Sizes [3, 3, 9, 1] with limit 6 give [(0, 2), (2, 3), (3, 4)].
    """
    bounds = []
    start, filled = 0, 0
    for row, size in enumerate(sizes.tolist()):
        if row > start and filled + size > limit:
            bounds.append((start, row))
            start, filled = row, 0
        filled += size
    if len(sizes) > start:
        bounds.append((start, len(sizes)))
    return bounds
