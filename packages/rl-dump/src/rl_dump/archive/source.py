"""How a torch archive is read as a dump: no torch, tensors on demand, every byte checked.

Invariants, matched by tests in `test_torch_dumps.py` and `test_torch_archive.py`, `tests/unit/`:

- a dump written as `.pt` and as `.parquet` reads the same, field by field;
- no value is handed out whose storage does not match its checksum.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_dump.archive.layouts import ArchiveContent, recognise
from rl_dump.archive.pickle_machine import run_pickle
from rl_dump.archive.tensors import (
    NumpyArray,
    StorageRef,
    TensorRef,
    archive_globals,
    storage_of,
    tensor_array,
)
from rl_dump.archive.tree import check_tree
from rl_dump.archive.zip_index import ZipIndex
from rl_dump.checks import Problem, structure_problems
from rl_dump.columns.column_types import column_of, contract_column, number_column
from rl_dump.columns.fields import Column, Field
from rl_dump.columns.ragged import RaggedArray
from rl_dump.columns.tagged_json import Tensor
from rl_dump.contract import DumpHeader
from rl_dump.errors import DumpError
from rl_dump.header import field_of

__all__ = ["ArchiveSource"]

_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_EXPANSION = 64
_EXPANSION_BYTES = 1 << 28


class ArchiveSource:
    """One torch archive, open for reading.

    Args:
        path: the file.
        check_sums: compare the checksum of everything read; False only for files written with
            torch's checksums turned off.

    Raises:
        DumpError: the file is missing, damaged or not a dump, or holds something other than data.
    """

    def __init__(self, path: Path, *, check_sums: bool = True) -> None:
        self._path = path
        self._check_sums = check_sums
        self._map = _mapped(path)
        try:
            self._zip = ZipIndex(self._map, str(path))
            self._folder, self._little = self._find_folder()
            self._content = self._unpickled()
            self.header: DumpHeader = self._content.header
            self.fields: Mapping[str, Field] = _LazyFields(self)
        except BaseException:
            self.close()
            raise

    def column(self, name: str, *, stored: bool) -> Column:
        """Read one column of all samples; see `Dump.column`.

        An archive stores the logical dtype, so `stored` changes nothing.
        """
        del stored
        items = [sample.get(name) for sample in self._content.samples]
        try:
            column = self._column_of(name, items)
        except DumpError as error:
            raise DumpError(
                f"{self._path}: field {name}: {str(error).removeprefix(f'{self._path}: ')}"
            ) from error
        return self._as_noted(name, column)

    def sample(self, row: int) -> dict[str, Any]:
        """Read one sample; see `Dump.sample`."""
        found: dict[str, Any] = {}
        for name in self.names():
            value = self._content.samples[row].get(name)
            if value is None:
                found[name] = None
                continue
            field = self.fields[name]
            value = self._resolved(value, nested=field.kind == "object")
            if field.kind == "ragged":
                found[name] = np.asarray(value, field.numpy_dtype)
            else:
                found[name] = (
                    np.asarray(value, field.numpy_dtype).item() if field.kind == "scalar" else value
                )
        return found

    def names(self) -> list[str]:
        """Return every field that some sample has, in order of appearance."""
        if self.header["fields"]:
            return list(self.header["fields"])
        return list(dict.fromkeys(name for sample in self._content.samples for name in sample))

    def field(self, name: str) -> Field:
        """Return what a column is, as the header notes it or the samples show."""
        noted = self.header["fields"].get(name)
        return (
            self.column(name, stored=False).field
            if noted is None
            else field_of(name, noted, where=str(self._path))
        )

    def verify(self) -> list[Problem]:
        """Compare every checksum.

        List damaged entries, else what is inconsistent in the samples.
        """
        problems = []
        for entry in self._zip.entries.values():
            try:
                self._zip.read(entry)
            except DumpError as error:
                problems.append(Problem(code="damaged", message=str(error)))
        if problems:
            return problems
        return structure_problems(
            self.header, {name: self.column(name, stored=False) for name in self.names()}
        )

    def close(self) -> None:
        """Release the samples; the file stays mapped while arrays of it are in use."""
        self._zip = ZipIndex.empty(str(self._path))

    def _find_folder(self) -> tuple[str, bool]:
        pickles = [name for name in self._zip.entries if PurePosixPath(name).name == "data.pkl"]
        if len(pickles) != 1:
            raise DumpError(
                f"{self._path}: a zip file, but not one that torch.save wrote: it holds"
                f" {len(pickles)} data.pkl"
            )
        folder = pickles[0][: -len("data.pkl")]
        if f"{folder}constants.pkl" in self._zip.entries:
            raise DumpError(f"{self._path}: a TorchScript program, not a dump")
        order = self._zip.entries.get(f"{folder}byteorder")
        return (
            folder,
            order is None or bytes(self._zip.read(order, check=self._check_sums)) == b"little",
        )

    def _unpickled(self) -> ArchiveContent:
        entry = self._zip.entries[f"{self._folder}data.pkl"]
        data = bytes(self._zip.read(entry, check=self._check_sums))
        root = run_pickle(
            data, known=archive_globals(), persistent_load=storage_of, where=str(self._path)
        )
        check_tree(root, str(self._path))
        return recognise(self._plain_header(root), str(self._path))

    def _plain_header(self, root: Any) -> Any:
        """Read the tensors and arrays beside the samples: the header is small."""
        if not isinstance(root, dict):
            return root
        return {
            key: value if key == "samples" else self._resolved(value, nested=True)
            for key, value in root.items()
        }

    def _column_of(self, name: str, items: list[Any]) -> Column:
        kinds = {type(item) for item in items if item is not None}
        strict = bool(self.header["fields"])
        if kinds == {TensorRef}:
            return self._tensor_column(name, items, strict=strict)
        if kinds == {NumpyArray}:
            arrays = [None if item is None else item.array for item in items]
            column = column_of(name, arrays, strict=strict)
            return (
                replace(column, field=replace(column.field, form="array"))
                if column.field.kind == "ragged"
                else column
            )
        return column_of(name, [self._resolved(item, nested=True) for item in items], strict=strict)

    def _tensor_column(self, name: str, items: list[TensorRef | None], *, strict: bool) -> Column:
        present = [item for item in items if item is not None]
        dims, dtypes = {len(item.shape) for item in present}, {item.dtype for item in present}
        trailing = {item.shape[1:] for item in present}
        if len(dims) > 1 or len(dtypes) > 1 or len(trailing) > 1:
            return column_of(
                name, [self._resolved(item, nested=True) for item in items], strict=strict
            )
        valid = (
            None if len(present) == len(items) else np.array([item is not None for item in items])
        )
        dtype = dtypes.pop()
        self._check_expansion(present)
        if dims == {0}:
            values = np.zeros(len(items), np.float32 if dtype == "bfloat16" else dtype)
            values[slice(None) if valid is None else valid] = [
                self._array(item) for item in present
            ]
            column = number_column(name, values, "tensor", valid=valid)
        else:
            column = number_column(
                name, self._laid_out(items, dtype, trailing.pop()), "tensor", valid=valid
            )
        if dtype == "bfloat16":
            return replace(column, field=replace(column.field, dtype=dtype))
        return contract_column(column, strict=strict)

    def _laid_out(
        self, items: list[TensorRef | None], dtype: str, trailing: tuple[int, ...]
    ) -> RaggedArray:
        numpy_dtype = np.dtype(np.float32 if dtype == "bfloat16" else dtype)
        offsets = np.zeros(len(items) + 1, np.int64)
        np.cumsum([0 if item is None else item.shape[0] for item in items], out=offsets[1:])
        run = _one_run(items, trailing)
        if run is not None:
            return RaggedArray(self._array(run), offsets)
        values = np.empty((int(offsets[-1]), *trailing), numpy_dtype)
        for item, start, stop in zip(
            items, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True
        ):
            if item is not None and stop > start:
                values[start:stop] = self._array(item)
        return RaggedArray(values, offsets)

    def _check_expansion(self, tensors: list[TensorRef]) -> None:
        size = sum(tensor.extent for tensor in tensors) * 8
        if size > max(_EXPANSION * len(self._map), _EXPANSION_BYTES):
            raise DumpError(
                f"its tensors expand a file of {len(self._map)} bytes to {size}; refused"
            )

    def _array(self, tensor: TensorRef) -> NDArray[Any]:
        return tensor_array(tensor, self._storage, swapped=not self._little)

    def _storage(self, storage: StorageRef) -> NDArray[np.uint8]:
        entry = self._zip.entries.get(f"{self._folder}data/{storage.key}")
        if entry is None:
            raise DumpError(f"storage {storage.key!r} is not in the archive")
        return np.frombuffer(self._zip.read(entry, check=self._check_sums), np.uint8)

    def _resolved(self, value: Any, *, nested: bool) -> Any:
        """Replace tensors, also in containers, by arrays; nested ones by records with a dtype."""
        if isinstance(value, TensorRef):
            array = np.array(self._array(value))
            return Tensor(array, value.dtype) if nested else array
        if isinstance(value, NumpyArray):
            return value.array
        if isinstance(value, dict):
            return {key: self._resolved(item, nested=True) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return (
                type(value)(self._resolved(item, nested=True) for item in value)
                if _holds_more(value)
                else value
            )
        return value

    def _as_noted(self, name: str, column: Column) -> Column:
        document = self.header["fields"].get(name)
        if document is None:
            return replace(
                column,
                field=replace(column.field, response_aligned=name in self._content.response_fields),
            )
        noted = field_of(name, document, where=str(self._path))
        found = column.field
        if (found.kind, found.dtype, found.trailing) != (
            noted.kind,
            noted.dtype,
            noted.trailing,
        ) and found.dtype != "json":
            raise DumpError(
                f"{self._path}: field {name}: the header says {noted.kind} {noted.dtype}, the"
                f" samples hold {found.kind} {found.dtype}"
            )
        return replace(column, field=noted)


class _LazyFields(Mapping[str, Field]):
    """The fields, each known when it is asked for: lists of numbers are walked for their dtype."""

    def __init__(self, source: ArchiveSource) -> None:
        self._source = source
        self._names = dict.fromkeys(source.names())
        self._known: dict[str, Field] = {}

    def __getitem__(self, name: str) -> Field:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            self._known[name] = self._source.field(name)
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _holds_more(value: list[Any] | tuple[Any, ...]) -> bool:
    return bool(set(map(type, value)) & {dict, list, tuple, TensorRef, NumpyArray})


def _one_run(items: list[TensorRef | None], trailing: tuple[int, ...]) -> TensorRef | None:
    """Return one tensor for all, if they lie end to end in one storage, as our writer lays them."""
    present = [item for item in items if item is not None and item.shape[0]]
    if not present:
        return None
    first = present[0]
    steps = [1]
    for size in reversed(trailing):
        steps.insert(0, steps[0] * size)
    strides = tuple(steps)
    following = first.offset
    for item in present:
        if item.storage is not first.storage or item.offset != following or item.strides != strides:
            return None
        following += item.shape[0] * strides[0]
    return (
        replace(first, shape=((following - first.offset) // strides[0], *trailing))
        if strides[0]
        else None
    )


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            head = file.read(len(_LEGACY_MAGIC))
            if not head:
                raise DumpError(f"{path}: empty file")
            if head == _LEGACY_MAGIC:
                raise DumpError(
                    f"{path}: written in torch's legacy format (before 1.6, or without zip); load"
                    " it with torch and save it again"
                )
            if head[:4] != b"PK\x03\x04":
                raise DumpError(f"{path}: not a torch archive (it starts with {head[:4]!r})")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DumpError(f"{path}: cannot be opened: {error.strerror or error}") from error
