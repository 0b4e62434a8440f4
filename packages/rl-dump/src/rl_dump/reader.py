"""What a dump looks like to whoever opens it: lazy columns, single samples, and notes.

`open_dump` picks the container by the file's suffix; `Dump` looks the same for all of them.

Invariants, each matched by a test in `tests/unit/test_reader.py`:

- opening reads the header only; a column or a sample reads only its own pages;
- every value handed out has passed its checksum;
- a file that cannot be read is a `DumpError` with one line that names it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_dump.archive.source import ArchiveSource
from rl_dump.checks import Problem
from rl_dump.columns.fields import Column, Field
from rl_dump.columns.ragged import RaggedArray
from rl_dump.errors import DumpError
from rl_dump.parquet.reader import ParquetSource

__all__ = ["Dump", "open_dump"]

_SUFFIXES = (".parquet", ".pt")
_NAMED = 4
"""Files of a folder that a message names."""


class Dump(AbstractContextManager["Dump"]):
    """One dump, as `open_dump` gives it. Use as a context manager, or call `close`."""

    def __init__(self, path: Path, source: ParquetSource | ArchiveSource) -> None:
        self._source = source
        self.path = path
        """The file."""
        header = self.header = source.header
        """The whole header."""
        self.fields: Mapping[str, Field] = source.fields
        """Every column by its contract name, in file order."""
        self.contract = header["contract"]
        """`train-dump.v2` or `rollout-dump.v1`."""
        self.batch_id = header["batch_id"]
        """The batch counter, or a word such as `eval_3`."""
        self.num_samples = header["num_samples"]
        """Number of samples, N."""
        self.dp_shards = header["dp_shards"]
        """One mapping per data-parallel rank, in rank order; empty for a rollout dump."""
        self.schedule = header["schedule"]
        """The plan document the batch ran under, or None."""
        self.raw_reward = header["raw_reward"]
        """Rewards before normalisation of the whole batch, in rollout order, or None."""
        self.dropped = header["dropped"]
        """Samples that were generated but not trained on, with the reason."""
        self.metadata = header["metadata"]
        """What the producer noted beside the samples."""

    def column(self, name: str, *, stored: bool = False) -> NDArray[Any] | RaggedArray | list[Any]:
        """Read one field of all samples.

        Args:
            name: a name in `fields`.
            stored: keep the dtype of the file (token ids in the smallest integer that fits) instead
                of the contract's.

        Returns:
            An array [N] for one value per sample, a `RaggedArray` of N items for arrays, a list [N]
            for strings, objects and columns in which some samples have no value (None).

        Raises:
            DumpError: there is no such field, or its bytes are damaged.
        """
        if name not in self.fields:
            raise DumpError(
                f"{self.path}: no field {name!r}; it has {', '.join(self.fields) or 'none'}"
            )
        return self._source.column(name, stored=stored).plain()

    def sample(self, row: int) -> dict[str, Any]:
        """Read every field of one sample.

        Args:
            row: 0-based row of the file; negative counts from the end. Not the rollout position:
                see `positions`.

        Raises:
            DumpError: there is no such row, or its bytes are damaged.
        """
        position = row + self.num_samples if row < 0 else row
        if not 0 <= position < self.num_samples:
            raise DumpError(f"{self.path}: sample {row} asked of {self.num_samples}")
        return self._source.sample(position)

    def positions(self) -> NDArray[np.int64]:
        """Return each row's rollout position: int64 [N]; the row number where the dump holds none.

        Raises:
            DumpError: the column is damaged.
        """
        found = self.column("rollout_position") if "rollout_position" in self.fields else []
        # A list: some sample has no position, or the dump holds none.
        return (
            np.arange(self.num_samples) if isinstance(found, list) else np.asarray(found, np.int64)
        )

    def columns(self) -> dict[str, Column]:
        """Read every field of all samples, with what each is: what a conversion needs.

        Raises:
            DumpError: a column is damaged.
        """
        return {name: self._source.column(name, stored=False) for name in self.fields}

    def verify(self) -> list[Problem]:
        """Read the whole file and list what is wrong with it.

        An empty list means that nothing is.
        """
        return self._source.verify()

    def close(self) -> None:
        """Release the file."""
        self._source.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the file."""
        self.close()

    def __repr__(self) -> str:
        """Name file, contract and size."""
        return (
            f"Dump({str(self.path)!r}, {self.contract}, batch {self.batch_id}, {self.num_samples}"
            f" samples, {len(self.fields)} fields)"
        )


def open_dump(path: str | os.PathLike[str], *, check_sums: bool = True) -> Dump:
    """Open a dump; only its header is read (of a `.pt` file: its pickle, but no tensor).

    Args:
        path: a `.parquet` file, or a `.pt` file: ours, or one of slime's train or rollout dumps.
            Torch is not needed for either.
        check_sums: compare the checksums of what is read from a `.pt` file. False only for files
            that torch wrote with `torch.serialization.set_crc32_options(False)`; damage is then not
            noticed.

    Raises:
        DumpError: the file is missing, damaged, or not a dump; one line that says what and where.
        UnsupportedContractError: the file is a document of another contract or major.
    """
    target = Path(path)
    _check_kind(target)
    if target.suffix == ".parquet":
        return Dump(target, ParquetSource(target))
    if target.suffix == ".pt":
        return Dump(target, ArchiveSource(target, check_sums=check_sums))
    raise DumpError(
        f"{target}: cannot tell the container from the suffix {target.suffix!r}; dumps end in"
        " .parquet or .pt"
    )


def _check_kind(path: Path) -> None:
    """Refuse what is not a regular file: a pipe would wait for a writer, a device may never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise DumpError(
            f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}"
        ) from error
    if stat.S_ISDIR(mode):
        raise DumpError(_folder_message(path))
    if not stat.S_ISREG(mode):
        raise DumpError(
            f"{path}: a pipe, device or socket; a dump is a regular file: copy it into one first"
        )


def _folder_message(folder: Path) -> str:
    """Name the dumps that a folder holds, or those in its folders, where a run keeps them."""
    for pattern in ("*", "*/*"):
        found = sorted(path for suffix in _SUFFIXES for path in folder.glob(pattern + suffix))
        if found:
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            return (
                f"{folder}: a folder; give one of its files:"
                f" {', '.join(map(str, found[:_NAMED]))}{more}"
            )
    return f"{folder}: a folder, and there is no .parquet or .pt file in it"
