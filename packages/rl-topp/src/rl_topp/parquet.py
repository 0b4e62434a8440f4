"""The columns that `rl-topp stats` needs, out of a dump in Parquet form.

Layer: pyarrow (extra `[parquet]`), above `stats`. Reads `train-dump.v2` and `rollout-dump.v1` by column name; everything else in the file is ignored.
Invariant: a sample without kept sets (null) is left out of every column alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rl_topp.errors import NucleusError, UnsupportedContractError
from rl_topp.stats import KeptSetStats, kept_set_stats

__all__ = ["READABLE_CONTRACTS", "stats_of_dump"]

READABLE_CONTRACTS: Final = ("train-dump.v2", "rollout-dump.v1")
"""Contracts of the dumps that carry the columns."""
_METADATA_KEY: Final = b"rl_dump"
_REQUIRED: Final = ("nucleus_offsets", "nucleus_status", "loss_masks")
_OPTIONAL: Final = ("rollout_log_probs", "rollout_full_log_probs", "log_probs")


def stats_of_dump(path: Path) -> KeptSetStats:
    """Summarise the kept sets of one dump.

    Args:
        path: a `.parquet` dump.

    Raises:
        NucleusError: the file cannot be read as Parquet, lacks a column, or its columns do not fit together; names file and column.
        UnsupportedContractError: it is a dump of another contract.
    """
    try:
        file = pq.ParquetFile(path)
        _check_contract(path, file.metadata.metadata)
        names = set(file.schema_arrow.names)
        missing = [name for name in _REQUIRED if name not in names]
        if missing:
            raise NucleusError(f"{path}: no column {', '.join(missing)}; was the run recorded with kept sets (rollout.replay = true)?")
        table = file.read(columns=[name for name in (*_REQUIRED, *_OPTIONAL) if name in names])
    except (OSError, pa.ArrowException) as error:
        raise NucleusError(f"{path}: cannot be read as Parquet: {error}") from error
    table = table.filter(table.column("nucleus_status").is_valid())
    offsets, offset_counts = _flat(path, table, "nucleus_offsets")
    status, counts = _flat(path, table, "nucleus_status")
    columns = {"loss_masks": _aligned(path, table, "loss_masks", counts)}
    columns |= {name: _aligned(path, table, name, counts) for name in _OPTIONAL if name in table.column_names}
    if not np.array_equal(offset_counts, counts + 1):
        sample = int(np.flatnonzero(offset_counts != counts + 1)[0])
        raise NucleusError(
            f"{path}: sample {sample} has {offset_counts[sample]} nucleus_offsets for {counts[sample]} tokens, expected {counts[sample] + 1}"
        )
    return kept_set_stats(set_sizes=_sizes(offsets, offset_counts), status=status.astype(np.uint8), **columns)


def _check_contract(path: Path, metadata: Mapping[bytes, bytes] | None) -> None:
    # Of the file, not of its Arrow schema: a header that is written after the rows stands only there.
    raw = (metadata or {}).get(_METADATA_KEY)
    if raw is None:
        raise NucleusError(f"{path}: not a dump: the Parquet metadata has no key {_METADATA_KEY.decode()!r}")
    try:
        contract = json.loads(raw).get("contract")
    except (ValueError, AttributeError) as error:
        raise NucleusError(f"{path}: the metadata under {_METADATA_KEY.decode()!r} is not a JSON object: {error}") from error
    if contract not in READABLE_CONTRACTS:
        raise UnsupportedContractError(
            f"{path}: contract {contract!r}, this version of rl-topp reads {' and '.join(READABLE_CONTRACTS)}; convert it with rl-dump"
        )


def _flat(path: Path, table: pa.Table, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return a list column's values end to end, and its list lengths."""
    column = table.column(name).combine_chunks()
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise NucleusError(f"{path}: column {name} has type {column.type}, expected a list per sample")
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), lengths


def _aligned(path: Path, table: pa.Table, name: str, counts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return a response-aligned column, NaN for samples where it is null."""
    values, lengths = _flat(path, table, name)
    absent = table.column(name).is_null().to_numpy(zero_copy_only=False).astype(bool)
    wrong = np.flatnonzero((lengths != counts) & ~absent)
    if wrong.size:
        sample = int(wrong[0])
        raise NucleusError(f"{path}: sample {sample} has {lengths[sample]} {name} for {counts[sample]} tokens")
    if not absent.any():
        return values
    full = np.full(int(counts.sum()), np.nan, np.float32)
    full[np.repeat(~absent, counts)] = values
    return full


def _sizes(offsets: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ids per token: differences of the offsets inside each sample, none across the seam of two."""
    if offsets.size == 0:
        return np.zeros(0, np.int64)
    within = np.ones(offsets.size - 1, np.bool_)
    within[np.cumsum(lengths)[:-1] - 1] = False
    return np.diff(offsets.astype(np.int64))[within]
