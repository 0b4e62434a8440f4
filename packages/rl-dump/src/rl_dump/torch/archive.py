"""How a dump becomes a torch archive (`.pt`), the layout that others read with `torch.load`.

Each field is one storage, and each sample's tensor a view of it: a hundred times fewer zip entries
than one storage per tensor, and the same samples for whoever loads the file.

Invariant, matched by `tests/property/test_torch_convert_laws.py`: a dump converted to `.pt` and
back is the same dump.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import torch
from typing_extensions import Unpack

from rl_dump.atomic import atomic_path
from rl_dump.columns.column_types import build_columns
from rl_dump.columns.fields import Column, ColumnInput, Field
from rl_dump.columns.ragged import RaggedArray
from rl_dump.columns.tagged_json import Tensor
from rl_dump.contract import RESPONSE_FIELDS, DumpHeader
from rl_dump.errors import DumpError
from rl_dump.header import HeaderKeywords, make_header
from rl_dump.parquet.arrow_columns import arrow_schema, decode

__all__ = ["archive_pieces", "save_archive", "write_torch_archive"]


def write_torch_archive(
    path: str | os.PathLike[str],
    *,
    columns: Mapping[str, ColumnInput],
    response_fields: Iterable[str] = RESPONSE_FIELDS,
    **header: Unpack[HeaderKeywords],
) -> Path:
    """Write one batch to a torch archive, atomically.

    Arguments and errors are those of `rl_dump.write_dump`.

    The whole batch is in memory while it is written; the Parquet writer needs one row group.
    """
    built = build_columns(columns, response_fields=response_fields)
    num_samples = len(next(iter(built.values()))) if built else 0
    return save_archive(
        path,
        make_header(
            num_samples=num_samples, fields=[column.field for column in built.values()], **header
        ),
        built,
    )


@contextmanager
def archive_pieces(
    path: Path, *, fields: Sequence[Field], **header: Unpack[HeaderKeywords]
) -> Iterator[Callable[[Mapping[str, pa.Array]], None]]:
    """Yield a function that takes a dump piece by piece, as `DumpWriter.write_arrays` does.

    A torch archive is one pickle: the pieces stay in memory, and the file is written at the end of
    the `with` block, unless that ends with an exception.

    Raises:
        WriteError: at the end of the block, the file system refused.
    """
    document = make_header(num_samples=0, fields=fields, **header)
    pieces = [pa.table({field.name: [] for field in fields}, schema=arrow_schema(fields))]
    yield lambda arrays: pieces.append(pa.table(dict(arrays), schema=pieces[0].schema))
    whole = pa.concat_tables(pieces)
    columns = {
        field.name: decode(field, whole.column(field.name).combine_chunks()) for field in fields
    }
    save_archive(path, {**document, "num_samples": whole.num_rows}, columns)


def save_archive(
    path: str | os.PathLike[str], header: DumpHeader, columns: Mapping[str, Column]
) -> Path:
    """Write a header and its columns to a torch archive, atomically.

    Raises:
        DumpError: the path does not end in `.pt`.
        WriteError: the file system refused.
    """
    target = Path(path)
    if target.suffix != ".pt":
        raise DumpError(
            f"{target}: a torch archive must end in .pt: the suffix tells readers the container"
        )
    values = {name: _per_sample(column) for name, column in columns.items()}
    root: dict[str, Any] = {
        "format_version": header["format_version"],
        "rollout_id": header["batch_id"],
        "rank": header["writer_rank"],
        "samples": [
            {name: items[row] for name, items in values.items()}
            for row in range(header["num_samples"])
        ],
        "dp_shards": _torch_value(header["dp_shards"]),
    }
    skipped = {"batch_id", "writer_rank", "num_samples", "row_groups", "checksums", *root}
    root |= {key: _torch_value(value) for key, value in header.items() if key not in skipped}
    with atomic_path(target) as temporary, temporary.open("wb", buffering=0) as file:
        # Through a file object: torch would name the archive's folder after the temporary path.
        telling = _TellingFile(file)
        try:
            torch.save(root, cast("IO[bytes]", telling))
        except RuntimeError as error:
            # Torch tells only that a write failed; the system's reason is with the file.
            raise telling.cause or OSError(str(error).splitlines()[0]) from error
    return target


def _per_sample(column: Column) -> list[Any]:
    field, values = column.field, column.values
    if isinstance(values, list):
        return [_torch_value(value) for value in values] if field.kind == "object" else values
    if isinstance(values, RaggedArray):
        items = _ragged_items(column, values)
    elif field.form == "tensor":
        items = list(_tensor(values, field.dtype).unbind())
    elif field.form == "generic":
        items = list(values)
    else:
        items = values.tolist()
    if column.valid is None:
        return items
    return [
        item if valid else None for item, valid in zip(items, column.valid.tolist(), strict=True)
    ]


def _ragged_items(column: Column, values: RaggedArray) -> list[Any]:
    if column.field.form == "list":
        return [item.tolist() for item in values]
    if column.field.form == "array":
        return [np.array(item) for item in values]
    return list(torch.split(_tensor(values.values, column.field.dtype), values.lengths.tolist()))


def _tensor(values: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    whole = np.ascontiguousarray(values)
    tensor = torch.from_numpy(whole if whole.flags.writeable else whole.copy())
    if not tensor.numel():
        # numpy's empty arrays may share an address, which torch.save takes for one storage of
        # several types.
        tensor = tensor.clone()
    return tensor.to(torch.bfloat16) if dtype == "bfloat16" else tensor


def _torch_value(value: Any) -> Any:
    """Turn the tensors inside an object back into torch's."""
    if isinstance(value, Tensor):
        return _tensor(value.array, value.dtype)
    if isinstance(value, dict):
        return {key: _torch_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_torch_value(item) for item in value)
    return value


class _TellingFile:
    """A file that keeps the cause of a failed write: torch reports only that one failed."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.cause: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write all of `data`; returns its size."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            self.cause = error
            raise
        return done

    def flush(self) -> None:
        """Do nothing: nothing is held back."""
