"""Decide how a Parquet dump is read: lazily, by column or by row group, every value checked against its checksum.

Layer: algorithms (imports pyarrow).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_dump.checks import structure_problems
from rl_dump.errors import DumpError
from rl_dump.header import field_of, open_header
from rl_dump.parquet import CRC_KEY, HEADER_KEY, arrow_schema, checksum, decode
from rl_dump.problems import Problem

if TYPE_CHECKING:
    from pathlib import Path

    from rl_dump.contract import DumpHeader
    from rl_dump.fields import Column, Field

__all__ = ["ParquetSource"]

_MAGIC = b"PAR1"
_THREADS = 4
_GROUPS_PER_THREAD = 16
_ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError)


class ParquetSource:
    """Read one Parquet dump.

    Args:
        path: the file.

    Raises:
        DumpError: the file is missing, damaged or not a dump.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path)
        metadata = self._file.metadata
        keys = metadata.metadata or {}
        if HEADER_KEY.encode() not in keys:
            self._file.close()
            msg = f"{path}: a Parquet file, but not a dump: it has no {HEADER_KEY!r} metadata"
            raise DumpError(msg)
        try:
            self.header: DumpHeader = open_header(keys[HEADER_KEY.encode()], keys.get(CRC_KEY.encode()), where=str(path))
            self.fields: dict[str, Field] = {
                name: field_of(name, document, where=str(path)) for name, document in self.header["fields"].items()
            }
            self._starts = self._check_layout()
        except BaseException:
            self._file.close()
            raise

    def column(self, name: str, *, stored: bool) -> Column:
        """Read one column of all samples; see `Dump.column`."""
        groups = len(self.header["row_groups"])
        parts = [part.tolist() for part in np.array_split(np.arange(groups), max(1, min(_THREADS, groups // _GROUPS_PER_THREAD)))]
        if len(parts) == 1:
            whole = self._read_part(self._file, name, parts[0])
        else:
            with ThreadPoolExecutor(len(parts)) as pool:
                whole = pa.concat_arrays(pool.map(lambda part: self._read_part(self._reopened(), name, part), parts))
        return self._decode(self.fields[name], whole, stored=stored)

    def sample(self, row: int) -> dict[str, Any]:
        """Read one sample; see `Dump.sample`."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        table = self._read_group(group)
        sample = {}
        for name, field in self.fields.items():
            whole = table.column(name).combine_chunks()
            self._check(name, group, whole)
            sample[name] = self._decode(field, whole.slice(row - self._starts[group], 1)).item(0)
        return sample

    def verify(self) -> list[Problem]:
        """Read everything; list damaged columns, else what is inconsistent in the samples."""
        problems = []
        for group in range(len(self.header["row_groups"])):
            try:
                table = self._read_group(group)
                for name in self.fields:
                    self._check(name, group, table.column(name).combine_chunks())
            except DumpError as error:
                problems.append(Problem(code="damaged", message=str(error)))
        return problems or structure_problems(self.header, {name: self.column(name, stored=False) for name in self.fields})

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _decode(self, field: Field, array: pa.Array, *, stored: bool = False) -> Column:
        try:
            return decode(field, array, stored=stored)
        except DumpError as error:
            msg = f"{self._path}: field {error}"
            raise DumpError(msg) from error

    def _read_part(self, file: pq.ParquetFile, name: str, groups: list[int]) -> pa.Array:
        """Read a run of row groups of one column, checked; decoding and checking leave Python's lock, so parts run side by side."""
        try:
            table = file.read_row_groups(groups, columns=[name], use_threads=False)
            chunks = table.column(name)
            part = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
        except _ARROW_ERRORS as error:
            raise self._damaged(f"field {name}", error) from error
        first = self._starts[groups[0]] if groups else 0
        for group in groups:
            self._check(name, group, part.slice(self._starts[group] - first, self._starts[group + 1] - self._starts[group]))
        return part

    def _reopened(self) -> pq.ParquetFile:
        # One reader per thread: arrow does not say that one may be shared.
        try:
            return pq.ParquetFile(self._path, memory_map=True, metadata=self._file.metadata)
        except _ARROW_ERRORS as error:
            raise self._damaged("file", error) from error

    def _read_group(self, group: int) -> pa.Table:
        try:
            return self._file.read_row_group(group, use_threads=False)
        except _ARROW_ERRORS as error:
            raise self._damaged(f"row group {group}", error) from error

    def _check(self, name: str, group: int, array: pa.Array) -> None:
        expected = self.header["checksums"][name][group]
        try:
            found = checksum(array)
        except _ARROW_ERRORS as error:
            raise self._damaged(f"field {name}, row group {group}", error) from error
        if found != expected:
            msg = f"{self._path}: field {name}, row group {group}: the checksum does not match: the file is damaged or was rewritten"
            raise DumpError(msg)

    def _damaged(self, where: str, error: BaseException) -> DumpError:
        return DumpError(f"{self._path}: {where}: damaged ({_one_line(error)})")

    def _check_layout(self) -> list[int]:
        rows, checksums = self.header["row_groups"], self.header["checksums"]
        metadata = self._file.metadata
        found = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        if rows != found or sum(found) != self.header["num_samples"]:
            msg = (
                f"{self._path}: {sum(found)} samples in {len(found)} row groups, the header says {self.header['num_samples']} in {len(rows)}: "
                "the file is damaged or was rewritten by another program"
            )
            raise DumpError(msg)
        if any(not isinstance(checksums.get(name), list) or len(checksums[name]) != len(rows) for name in self.fields):
            msg = f"{self._path}: a row group without checksums"
            raise DumpError(msg)
        try:
            schema = self._file.schema_arrow
        except _ARROW_ERRORS as error:
            raise self._damaged("schema", error) from error
        expected = arrow_schema(list(self.fields.values()))
        if not schema.remove_metadata().equals(expected):
            msg = f"{self._path}: columns {schema.names} do not have the names and types that the header gives"
            raise DumpError(msg)
        return [0, *np.cumsum(found).tolist()]


def _open(path: Path) -> pq.ParquetFile:
    try:
        with path.open("rb") as file:
            head = file.read(4)
            size = file.seek(0, 2)
    except OSError as error:
        msg = f"{path}: cannot be opened: {error.strerror or error}"
        raise DumpError(msg) from error
    if size == 0:
        msg = f"{path}: empty file"
        raise DumpError(msg)
    if head != _MAGIC:
        msg = f"{path}: not a Parquet file (it starts with {head!r})"
        raise DumpError(msg)
    try:
        return pq.ParquetFile(path, memory_map=True)
    except _ARROW_ERRORS as error:
        msg = f"{path}: damaged or cut short ({_one_line(error)})"
        raise DumpError(msg) from error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
