"""Decide how a dump gets into a Parquet file: row groups of bounded size, checksums, and the file whole or not at all.

Layer: algorithms. `write_dump` takes whole columns; `DumpWriter` takes them piece by piece, so that a producer need never hold a batch.

Invariants, each matched by a test in `tests/unit/test_writer.py`:

- a failed write leaves the old file, or none;
- a row group holds at most `ROW_GROUP_BYTES` of values unless one sample alone is larger;
- what is read back equals what was written, dtype and bits.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import Self

from rl_dump.atomic import atomic_path
from rl_dump.contract import RESPONSE_FIELDS, DroppedSample, DumpHeader, RowGroupDocument
from rl_dump.errors import DumpError, WriteError
from rl_dump.fields import Column, ColumnInput, Field
from rl_dump.header import field_of, make_header, seal_header
from rl_dump.inference import build_columns
from rl_dump.parquet import (
    CRC_KEY,
    HEADER_KEY,
    arrow_schema,
    checksum,
    encode,
    smallest_stored,
)
from rl_dump.ragged import RaggedArray

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["ROW_GROUP_BYTES", "DumpWriter", "integer_range", "row_bytes", "row_group_bounds", "store_smallest", "write_dump"]

ROW_GROUP_BYTES = 4 << 20
"""Values per row group, before compression: a reader of one sample decodes this much, a streaming writer holds this much."""


def write_dump(
    path: str | os.PathLike[str],
    *,
    contract: str,
    batch_id: int | str,
    columns: Mapping[str, ColumnInput],
    dp_shards: Sequence[Mapping[str, Any]] = (),
    schedule: Mapping[str, Any] | None = None,
    raw_reward: Iterable[float] | None = None,
    dropped: Sequence[DroppedSample] = (),
    writer_rank: int = 0,
    response_fields: Iterable[str] = RESPONSE_FIELDS,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write one batch to a Parquet file, atomically.

    Args:
        path: where the file shall be; must end in `.parquet`. An existing file is replaced, whole.
        contract: `train-dump.v2` or `rollout-dump.v1`.
        batch_id: the batch counter, or a word such as `"eval_3"`.
        columns: per field an array [N], a `RaggedArray` of N items, or a list of N values (strings, numbers, None, JSON).
            Names, dtypes and lengths of the fields the contract names are checked; others are kept as they come.
        dp_shards: one mapping per data-parallel rank: `rank`, `data_parallel_rank`, `sample_indices`, `partition`,
            `micro_batch_indices`, `num_microbatches`, `global_batch_sizes`.
        schedule: the plan document (`schedule-plan.v1`) the batch ran under.
        raw_reward: rewards before normalisation, of the whole batch in rollout order: float64 [batch].
        dropped: samples that were generated but not trained on, each with a `reason`.
        writer_rank: global rank of the writing process.
        response_fields: names of the fields with one value per response token.
        metadata: anything else worth keeping, written as tagged JSON.

    Returns:
        The path written.

    Raises:
        DumpError: the columns do not make a dump; the message lists every problem.
        WriteError: the file system refused.
    """
    built = {name: store_smallest(column) for name, column in build_columns(columns, response_fields=response_fields).items()}
    rows = len(next(iter(built.values()))) if built else 0
    with DumpWriter(
        path,
        fields=[column.field for column in built.values()],
        contract=contract,
        batch_id=batch_id,
        writer_rank=writer_rank,
        dp_shards=dp_shards,
        schedule=schedule,
        raw_reward=raw_reward,
        dropped=dropped,
        metadata=metadata,
    ) as writer:
        for start, stop in row_group_bounds(row_bytes(built, rows)):
            writer.write({name: column.take(np.arange(start, stop)) for name, column in built.items()})
    return Path(path)


class DumpWriter:
    """Write a dump row group by row group; use as a context manager.

    The file appears under its name when the block ends without an exception; otherwise nothing is left behind.

    Args:
        path: as for `write_dump`.
        fields: every column of the dump, with the dtype it is stored in.
        header: the other keywords of `write_dump`.

    Raises:
        WriteError: the file system refused, here or in `write`.
    """

    def __init__(self, path: str | os.PathLike[str], *, fields: Sequence[Field], **header: Any) -> None:
        self._path = Path(path)
        if self._path.suffix != ".parquet":
            msg = f"{self._path}: this writer makes .parquet files; for .pt use rl_dump.torch.write_torch_archive or `rl-dump convert`"
            raise DumpError(msg)
        self._set_up(make_header(num_samples=0, fields=fields, **header))

    @classmethod
    def with_header(cls, path: str | os.PathLike[str], header: DumpHeader) -> DumpWriter:
        """Return a writer for a header that exists already, such as that of a dump that is converted."""
        fields = [field_of(name, document, where=str(path)) for name, document in header["fields"].items()]
        writer = cls(path, fields=fields, contract=header["contract"], batch_id=header["batch_id"], writer_rank=header["writer_rank"])
        writer._set_up(header)
        return writer

    def _set_up(self, header: DumpHeader) -> None:
        self._header: DumpHeader = {**header}
        self._fields = {name: field_of(name, document, where=str(self._path)) for name, document in header["fields"].items()}
        self._groups: list[RowGroupDocument] = []
        self._stack = contextlib.ExitStack()
        self._parquet: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        """Open the temporary file."""
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self._path))
            schema = arrow_schema(list(self._fields.values()))
            self._parquet = pq.ParquetWriter(temporary, schema, **_parquet_options(list(self._fields.values())))
            stack.callback(self._parquet.close)
            self._stack = stack.pop_all()
        return self

    def write(self, columns: Mapping[str, Column]) -> None:
        """Append one row group.

        Args:
            columns: exactly the writer's fields, all with the same number of samples.

        Raises:
            DumpError: other fields, or different numbers of samples.
            WriteError: the file system refused.
        """
        if set(columns) != set(self._fields):
            msg = f"{self._path}: row group has fields {sorted(columns)}, the dump has {sorted(self._fields)}"
            raise DumpError(msg)
        self.write_arrays({name: encode(replace(columns[name], field=field)) for name, field in self._fields.items()})

    def write_arrays(self, arrays: Mapping[str, pa.Array]) -> None:
        """Append one row group of arrow arrays, already in the types of `parquet.arrow_schema`; otherwise as `write`."""
        if self._parquet is None:
            msg = f"{self._path}: nothing can be written outside of the writer's `with` block"
            raise DumpError(msg)
        rows = {len(array) for array in arrays.values()}
        if len(rows) > 1:
            msg = f"{self._path}: columns of one row group have {sorted(rows)} samples"
            raise DumpError(msg)
        if not rows or rows == {0}:
            return
        try:
            self._parquet.write_table(pa.table(dict(arrays), schema=self._parquet.schema), row_group_size=max(rows))
        except OSError as error:
            msg = f"cannot write {self._path}: {error.strerror or error}"
            raise WriteError(msg) from error
        self._groups.append({"rows": max(rows), "crc32": {name: checksum(array) for name, array in arrays.items()}})

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Seal the file and give it its name, or remove it after an exception."""
        parquet, self._parquet = self._parquet, None
        if kind is None and parquet is not None:
            self._header["num_samples"] = sum(group["rows"] for group in self._groups)
            self._header["row_groups"] = self._groups
            try:
                text, crc = seal_header(self._header)
                parquet.add_key_value_metadata({HEADER_KEY: text, CRC_KEY: crc})
            except BaseException as failure:
                self._stack.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._stack.__exit__(kind, error, trace)


def store_smallest(column: Column, span: tuple[int, int] | None = None) -> Column:
    """Return the column with the smallest stored dtype for its integers; other columns as they are.

    Args:
        column: any column.
        span: lowest and highest value, if known for more samples than these.
    """
    span = integer_range(column) if span is None else span
    if span is None:
        return column
    return replace(column, field=replace(column.field, stored=smallest_stored(column.field.dtype, *span)))


def integer_range(column: Column) -> tuple[int, int] | None:
    """Return the lowest and highest value of a ragged integer column, (0, 0) if it is empty, None for any other column."""
    if not isinstance(column.values, RaggedArray) or column.values.dtype.kind not in "iu":
        return None
    flat = column.values.values
    return (int(flat.min()), int(flat.max())) if flat.size else (0, 0)


def row_bytes(columns: Mapping[str, Column], rows: int) -> NDArray[np.int64]:
    """Return how many bytes of values each sample has: int64 [rows]."""
    total = np.zeros(rows, np.int64)
    for column in columns.values():
        if isinstance(column.values, RaggedArray):
            width = int(np.prod(column.field.trailing, dtype=np.int64)) * np.dtype(column.field.stored).itemsize
            total += column.values.lengths * width
        elif isinstance(column.values, list):
            total += np.array([len(value) if isinstance(value, str) else 64 for value in column.values], np.int64)
        else:
            total += 8
    return total


def row_group_bounds(sizes: NDArray[np.int64], limit: int = ROW_GROUP_BYTES) -> list[tuple[int, int]]:
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


def _parquet_options(fields: Sequence[Field]) -> dict[str, Any]:
    floats = [_leaf(field) for field in fields if field.kind in {"scalar", "ragged"} and np.dtype(field.stored).kind == "f"]
    others = [_leaf(field) for field in fields if _leaf(field) not in floats]
    return {
        "compression": "zstd",
        "compression_level": 1,
        # Mantissas of log-probs are noise, their exponents are not: split by byte, the exponents compress alone.
        "use_byte_stream_split": floats,
        "use_dictionary": others,
        "write_page_checksum": True,
        "write_statistics": False,
        "version": "2.6",
    }


def _leaf(field: Field) -> str:
    return f"{field.name}.list.element" if field.kind == "ragged" else field.name
