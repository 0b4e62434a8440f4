"""Lengths and rollout ids out of a user's file; layer above `arrays`, read by the command line.

Decides which files are understood: JSON lines, a JSON document, or a Parquet rollout dump (extra
`parquet`). Invariant: a file that is not understood is refused with its path, its line and what was
expected; nothing is skipped.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_schedule.arrays import IntArray, integer_column, positive_column
from rl_schedule.contract import READ_BATCH_ID, READ_DUMP_ID
from rl_schedule.errors import ScheduleError, UnsupportedContractError

__all__ = ["Batch", "read_batch"]

_LENGTH_KEYS = ("total_length", "total_lengths", "length")
_ID_KEYS = ("rollout_id", "rollout_ids")

_DUMP_METADATA = b"rl_dump"
"""Key of the Parquet metadata under which a dump states its contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The two columns a plan needs."""

    total_lengths: IntArray
    """int64 [n], tokens of each sample."""
    rollout_ids: IntArray
    """int64 [n]; 0..n-1 where the file has none, one rollout per sample."""


def read_batch(path: Path) -> Batch:
    """Read lengths and rollout ids.

    - `.jsonl` (or any text): one integer per line, or one object with `total_length` and optionally
      `rollout_id`.
    - `.json`: a list of those, an object of columns `total_lengths` and optionally `rollout_ids`,
      or a `rollout-batch.v1` document with its arrays.
    - `.parquet`: columns `total_lengths` and optionally `rollout_ids`, as in a `rollout-dump.v1`.

    Raises:
        ScheduleError: the file is missing, empty or malformed; says where.
        UnsupportedContractError: a document or dump of another contract.
    """
    if not path.is_file():
        raise ScheduleError(f"{path}: no such file")
    if path.suffix == ".parquet":
        lengths, ids = _read_parquet(path)
    elif path.suffix == ".json":
        lengths, ids = _read_json(path)
    else:
        lengths, ids = _collect(path, _read_lines(path))
    try:
        column = positive_column(lengths, "total_lengths")
        numbers = integer_column(range(len(lengths)) if ids is None else ids, "rollout_ids")
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    if not column.size:
        raise ScheduleError(f"{path}: holds no samples")
    if numbers.size != column.size:
        raise ScheduleError(f"{path}: {column.size} total_lengths but {numbers.size} rollout_ids")
    return Batch(total_lengths=column, rollout_ids=numbers)


def _read_lines(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ScheduleError(f"{path}: line {number} is not JSON: {error.msg}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{path}: byte {error.start} is not UTF-8 text: give lengths as text, JSON or Parquet"
        ) from error


def _read_json(path: Path) -> tuple[list[object], list[object] | None]:
    try:
        document = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{path}: line {error.lineno} is not JSON: {error.msg}") from error
    if isinstance(document, list):
        return _collect(path, ((f"entry {number}", entry) for number, entry in enumerate(document)))
    columns = document if isinstance(document, dict) else {}
    if isinstance(columns.get("document"), dict):
        _check_contract(path, columns["document"].get("contract"), READ_BATCH_ID)
        columns = columns["arrays"] if isinstance(columns.get("arrays"), dict) else {}
    lengths, ids = columns.get("total_lengths"), columns.get("rollout_ids")
    if not isinstance(lengths, list) or not (ids is None or isinstance(ids, list)):
        raise ScheduleError(
            f"{path}: expected a list of samples, or an object with lists total_lengths and"
            " rollout_ids"
        )
    return lengths, ids


def _read_parquet(path: Path) -> tuple[list[object], list[object] | None]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ScheduleError(
            f"{path}: reading Parquet needs the extra: pip install 'rl-schedule[parquet]'"
        ) from error
    try:
        file = parquet.ParquetFile(path)
        stated = json.loads((file.metadata.metadata or {}).get(_DUMP_METADATA, b"{}")).get(
            "contract", READ_DUMP_ID
        )
        _check_contract(path, stated, READ_DUMP_ID)
        names = [
            name for name in ("total_lengths", "rollout_ids") if name in file.schema_arrow.names
        ]
        if "total_lengths" not in names:
            raise ScheduleError(
                f"{path}: has no column total_lengths; columns are"
                f" {', '.join(file.schema_arrow.names)}"
            )
        table = file.read(columns=names)
    except (ScheduleError, UnsupportedContractError):
        raise
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path}: not a readable Parquet file: {error}") from error
    return table["total_lengths"].to_pylist(), (
        table["rollout_ids"].to_pylist() if "rollout_ids" in names else None
    )


def _check_contract(path: Path, stated: object, understood: str) -> None:
    if stated != understood:
        raise UnsupportedContractError(
            f"{path}: this reader understands {understood!r}, the file says {stated!r}; write it as"
            f" {understood}"
        )


def _collect(
    path: Path, entries: Iterator[tuple[str, object]]
) -> tuple[list[object], list[object] | None]:
    """Split entries into the two columns; either every entry has a rollout id or none has."""
    lengths: list[object] = []
    ids: list[object] = []
    for where, entry in entries:
        length = _first(entry, _LENGTH_KEYS) if isinstance(entry, Mapping) else entry
        rollout = _first(entry, _ID_KEYS) if isinstance(entry, Mapping) else None
        if isinstance(length, bool) or not isinstance(length, int):
            raise ScheduleError(
                f"{path}: {where} must be an integer or an object with {_LENGTH_KEYS[0]}, got"
                f" {entry!r:.80}"
            )
        if (rollout is not None) != (len(ids) == len(lengths)) and lengths:
            raise ScheduleError(
                f"{path}: {where} {'has a' if rollout is not None else 'has no'} rollout_id, unlike"
                " the entries before it"
            )
        lengths.append(length)
        if rollout is not None:
            ids.append(rollout)
    return lengths, ids or None


def _first(entry: Mapping[str, object], names: tuple[str, ...]) -> object:
    return next((entry[name] for name in names if entry.get(name) is not None), None)
