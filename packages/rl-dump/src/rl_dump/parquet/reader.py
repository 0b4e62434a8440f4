"""How a Parquet dump is read: by column or row group, every value checked by its checksum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rl_dump.checks import Problem, structure_problems
from rl_dump.columns.fields import Column, Field
from rl_dump.columns.ragged import RaggedArray
from rl_dump.contract import DumpHeader
from rl_dump.errors import DumpError
from rl_dump.header import field_of, open_header
from rl_dump.parquet.arrow_columns import CRC_KEY, HEADER_KEY, arrow_schema, checksum, decode
from rl_dump.parquet.plain_columns import read_plain

__all__ = ["ParquetSource"]

_MAGIC = b"PAR1"
_ARROW_ERRORS = (
    pa.ArrowException,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    MemoryError,
)


class ParquetSource:
    """One Parquet dump, open for reading.

    Args:
        path: the file.

    Raises:
        DumpError: the file is missing, damaged or not a dump.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._bytes = _open(path)
        metadata = self._file.metadata
        keys = metadata.metadata or {}
        if HEADER_KEY.encode() not in keys:
            self.close()
            raise DumpError(
                f"{path}: a Parquet file, but not a dump: it has no {HEADER_KEY!r} metadata"
            )
        try:
            self.header: DumpHeader = open_header(
                keys[HEADER_KEY.encode()], keys.get(CRC_KEY.encode()), where=str(path)
            )
            self.fields: dict[str, Field] = {
                name: field_of(name, document, where=str(path))
                for name, document in self.header["fields"].items()
            }
            self._starts = self._check_layout()
        except BaseException:
            self.close()
            raise

    def column(self, name: str, *, stored: bool) -> Column:
        """Read one column of all samples; see `Dump.column`."""
        field = self.fields[name]
        plain = self._plain_column(field, stored=stored)
        if plain is not None:
            return plain
        with self._arrow_errors(f"field {name}"):
            chunks = self._file.read(columns=[name], use_threads=False).column(name)
            whole = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
        for group in range(len(self.header["row_groups"])):
            self._check(
                name,
                group,
                whole.slice(self._starts[group], self._starts[group + 1] - self._starts[group]),
            )
        return self._decode(field, whole, stored=stored)

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
        return problems or structure_problems(
            self.header, {name: self.column(name, stored=False) for name in self.fields}
        )

    def close(self) -> None:
        """Release the file."""
        # Without force, arrow leaves open what it was given open.
        self._file.close(force=True)

    def _decode(self, field: Field, array: pa.Array, *, stored: bool = False) -> Column:
        try:
            return decode(field, array, stored=stored)
        except DumpError as error:
            raise DumpError(f"{self._path}: field {error}") from error

    def _plain_column(self, field: Field, *, stored: bool) -> Column | None:
        """Read a response-aligned column past arrow, if it lies in the file as it is.

        None if not.
        """
        if not field.response_aligned or field.kind != "ragged" or field.trailing or field.nullable:
            return None
        lengths = self._response_lengths
        if lengths is None:
            return None
        column, dtype = list(self.fields).index(field.name), np.dtype(field.stored)
        values = read_plain(
            self._bytes,
            self._file.metadata,
            column,
            dtype,
            lengths,
            self.header["checksums"][field.name],
        )
        if values is None:
            return None
        logical = values if stored else values.astype(field.numpy_dtype, copy=False)
        return Column(
            field=field, values=RaggedArray(logical, np.concatenate([[0], np.cumsum(lengths)]))
        )

    @cached_property
    def _response_lengths(self) -> NDArray[np.int64] | None:
        """The length that response-aligned fields should have: int64 [N].

        None if the dump does not say.
        """
        if "response_lengths" not in self.fields:
            return None
        try:
            lengths = self.column("response_lengths", stored=False)
        except DumpError:
            # Another column than the one that is asked for: that one can be read without it.
            return None
        usable = (
            lengths.valid is None
            and lengths.field.kind == "scalar"
            and lengths.field.dtype == "int64"
        )
        return np.asarray(lengths.values) if usable else None

    def _read_group(self, group: int) -> pa.Table:
        with self._arrow_errors(f"row group {group}"):
            return self._file.read_row_group(group, use_threads=False)

    def _check(self, name: str, group: int, array: pa.Array) -> None:
        with self._arrow_errors(f"field {name}, row group {group}"):
            found = checksum(array)
        if found != self.header["checksums"][name][group]:
            raise DumpError(
                f"{self._path}: field {name}, row group {group}: the checksum does not match: the"
                " file is damaged or was rewritten"
            )

    @contextmanager
    def _arrow_errors(self, where: str) -> Iterator[None]:
        """Turn what arrow raises for a damaged file, or for want of memory, into a `DumpError`."""
        try:
            yield
        except MemoryError as error:
            raise DumpError(
                f"{self._path}: {where}: does not fit into memory ({_one_line(error)}); read it"
                " where there is more"
            ) from error
        except _ARROW_ERRORS as error:
            raise DumpError(f"{self._path}: {where}: damaged ({_one_line(error)})") from error

    def _check_layout(self) -> list[int]:
        rows, checksums = self.header["row_groups"], self.header["checksums"]
        metadata = self._file.metadata
        found = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        if rows != found or sum(found) != self.header["num_samples"]:
            raise DumpError(
                f"{self._path}: {sum(found)} samples in {len(found)} row groups, the header says"
                f" {self.header['num_samples']} in {len(rows)}: the file is damaged or was"
                " rewritten by another program"
            )
        if any(
            not isinstance(checksums.get(name), list) or len(checksums[name]) != len(rows)
            for name in self.fields
        ):
            raise DumpError(f"{self._path}: a row group without checksums")
        with self._arrow_errors("schema"):
            schema = self._file.schema_arrow
        expected = arrow_schema(list(self.fields.values()))
        if not schema.remove_metadata().equals(expected):
            raise DumpError(
                f"{self._path}: columns {schema.names} do not have the names and types that the"
                " header gives"
            )
        return [0, *np.cumsum(found).tolist()]


def _open(path: Path) -> tuple[pq.ParquetFile, memoryview]:
    """Map a file once: arrow and `read_plain` see the same one, whatever takes its name."""
    try:
        if not path.stat().st_size:
            raise DumpError(f"{path}: empty file")
        mapped = pa.memory_map(str(path))
        whole = memoryview(mapped.read_buffer())
    except OSError as error:
        raise DumpError(f"{path}: cannot be opened: {error.strerror or error}") from error
    if whole[:4] != _MAGIC:
        raise DumpError(f"{path}: not a Parquet file (it starts with {bytes(whole[:4])!r})")
    try:
        return pq.ParquetFile(mapped), whole
    except _ARROW_ERRORS as error:
        raise DumpError(f"{path}: damaged or cut short ({_one_line(error)})") from error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
