"""The columns that `rl-topp stats` needs, out of a dump in Parquet form.

Reads `train-dump.v2` and `rollout-dump.v1` by column name; everything else in the file is ignored.

Axes: N samples with kept sets.

Invariants: a sample without kept sets (null) is left out of every column alike; a column whose
values cannot be what its name says (another type, null entries, unknown status, offsets that fall)
is refused by file, column and sample, so that no figure comes out of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rl_topp.contract_header import check_header
from rl_topp.errors import NucleusError
from rl_topp.stats import NucleusStats, nucleus_stats
from rl_topp.validation import NucleusStatus, refuse_first

__all__ = ["READABLE_CONTRACTS", "stats_of_dump"]

READABLE_CONTRACTS: Final = {"train-dump.v2": 0, "rollout-dump.v1": 0}
"""Contracts of the dumps that carry the columns, with the newest minor known of each."""
_METADATA_KEY: Final = "rl_dump"
_REQUIRED: Final = ("nucleus_offsets", "nucleus_status", "loss_masks")
_OPTIONAL: Final = ("rollout_log_probs", "rollout_full_log_probs", "log_probs")
# What pyarrow raises on damaged files: besides its own errors, names that are not UTF-8 and counts
# that fit nothing.
_DAMAGE: Final = (OSError, pa.ArrowException, ValueError, KeyError, OverflowError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """Lists of one column, one for each sample that has kept sets."""

    path: Path
    """The file."""
    name: str
    """The column's name."""
    values: npt.NDArray[Any]
    """All lists end to end."""
    lengths: npt.NDArray[np.int64]
    """[N]: length of each list, 0 where it is null."""
    present: npt.NDArray[np.bool_]
    """[N]: whether there is a list."""

    def fail_where(self, wrong: npt.NDArray[np.bool_], expected: str) -> None:
        """Raise a `NucleusError` that names the first value in `wrong`, and its sample."""
        ends = np.cumsum(self.lengths)
        refuse_first(
            wrong,
            lambda place: (
                f"{self.path}: sample {int(np.searchsorted(ends, place, side='right'))} has"
                f" {self.values[place]} in {self.name}, expected {expected}"
            ),
        )


def stats_of_dump(path: Path) -> NucleusStats:
    """Summarise the kept sets of one dump.

    Args:
        path: a `.parquet` dump.

    Raises:
        NucleusError: the file cannot be read as Parquet, lacks a column or has it twice, or its
            columns hold what they cannot or do not fit together; names file and column, and the
            sample among those with kept sets.
        UnsupportedContractError: it is a dump of another contract.
    """
    table = _read(path)
    table = table.filter(table.column("nucleus_status").is_valid())
    offsets = _column(path, table, "nucleus_offsets", pa.types.is_integer)
    status = _column(path, table, "nucleus_status", pa.types.is_integer)
    masks = _column(path, table, "loss_masks", pa.types.is_integer)
    status.fail_where(
        (status.values < 0) | (status.values >= len(NucleusStatus)),
        f"0 to {len(NucleusStatus) - 1}",
    )
    masks.fail_where((masks.values != 0) & (masks.values != 1), "0 or 1")
    _check_lengths(offsets, status.lengths + 1)
    _check_lengths(masks, status.lengths)
    optional = {
        name: _aligned(_column(path, table, name, pa.types.is_floating), status.lengths)
        for name in _OPTIONAL
        if name in table.column_names
    }
    sizes = _sizes(offsets)
    status.fail_where(
        (status.values == NucleusStatus.KEPT) & (sizes == 0),
        "another status, since the token has no ids",
    )
    without = (status.values == NucleusStatus.NO_FILTER) | (
        status.values == NucleusStatus.NOT_SAMPLED
    )
    status.fail_where(without & (sizes != 0), "0 or 3, since the token has ids")
    return nucleus_stats(
        set_sizes=sizes,
        status=status.values.astype(np.uint8),
        loss_masks=masks.values.astype(np.int32),
        **optional,
    )


def _read(path: Path) -> pa.Table:
    """Return the columns that exist of those that count."""
    with _readable(path):
        file = pq.ParquetFile(path)
        metadata, names = file.metadata.metadata, list(file.schema_arrow.names)
    _check_contract(path, metadata)
    wanted = [name for name in (*_REQUIRED, *_OPTIONAL) if name in names]
    missing = ", ".join(name for name in _REQUIRED if name not in names)
    twice = ", ".join(name for name in wanted if names.count(name) > 1)
    NucleusError.raise_where(
        {
            f"{path}: no column {missing}; was the run recorded with kept sets (rollout.replay ="
            " true)?": bool(missing),
            f"{path}: more than one column {twice}": bool(twice),
        }
    )
    with _readable(path):
        return file.read(columns=wanted)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise NucleusError(f"{path}: cannot be read as Parquet: {error}") from error


def _check_contract(path: Path, metadata: Mapping[bytes, bytes] | None) -> None:
    # Of the file, not of its Arrow schema: a header that is written after the rows stands only
    # there.
    raw = (metadata or {}).get(_METADATA_KEY.encode())
    if raw is None:
        raise NucleusError(f"{path}: not a dump: the Parquet metadata has no key {_METADATA_KEY!r}")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise NucleusError(
            f"{path}: the metadata under {_METADATA_KEY!r} is not JSON: {error}"
        ) from error
    check_header(header, READABLE_CONTRACTS, where=str(path))


def _column(
    path: Path, table: pa.Table, name: str, is_wanted: Callable[[pa.DataType], bool]
) -> _Column:
    """Return a column of lists of numbers, refusing other types and null entries."""
    column = table.column(name).combine_chunks()
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or not is_wanted(
        column.type.value_type
    ):
        wanted = "integers" if is_wanted is pa.types.is_integer else "floating-point numbers"
        raise NucleusError(
            f"{path}: column {name} has type {column.type}, expected a list per sample, of {wanted}"
        )
    flat = column.flatten()
    if flat.null_count:
        raise NucleusError(
            f"{path}: column {name} has {flat.null_count} null entries inside its lists, expected a"
            " number each"
        )
    return _Column(
        path=path,
        name=name,
        values=flat.to_numpy(zero_copy_only=False),
        lengths=column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64),
        present=column.is_valid().to_numpy(zero_copy_only=False).astype(bool),
    )


def _check_lengths(column: _Column, expected: npt.NDArray[np.int64]) -> None:
    refuse_first(
        column.lengths != expected,
        lambda sample: (
            f"{column.path}: sample {sample} has {column.lengths[sample]} {column.name}, expected"
            f" {expected[sample]}"
        ),
    )


def _aligned(column: _Column, counts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return a response-aligned column, NaN for samples where it is null."""
    _check_lengths(column, np.where(column.present, counts, 0))
    if column.present.all():
        return column.values
    full = np.full(int(counts.sum()), np.nan, np.float32)
    full[np.repeat(column.present, counts)] = column.values
    return full


def _sizes(offsets: _Column) -> npt.NDArray[np.int64]:
    """Return ids per token: differences of offsets inside each sample, none across two samples."""
    values = offsets.values
    first = np.zeros(values.size, np.bool_)
    first[np.cumsum(offsets.lengths) - offsets.lengths] = True
    offsets.fail_where(first & (values != 0), "each sample's first offset to be 0")
    falls = np.zeros(values.size, np.bool_)
    falls[1:] = (values[1:] < values[:-1]) & ~first[1:]  # compared: differences could wrap around
    offsets.fail_where(falls, "offsets that do not decrease")
    return np.diff(values.astype(np.int64))[~first[1:]]
