"""Lengths and rollout ids out of a user's file: JSON lines, JSON, or a Parquet rollout dump.

Parquet needs the extra `parquet`.

Invariant: a file that is not understood is refused with its path, its line and what was expected;
nothing is skipped.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rl_schedule.arrays import IntArray, integer_column, positive_column
from rl_schedule.contract_header import check_header
from rl_schedule.errors import ScheduleError, UnsupportedContractError

__all__ = ["Batch", "read_batch", "read_json"]

_LENGTH_KEYS = ("total_length", "total_lengths", "length")
_ID_KEYS = ("rollout_id", "rollout_ids")

_DUMP, _DUMP_MINOR = "rollout-dump.v1", 0
"""Contract of the Parquet files that are read, and its newest minor that was looked at."""

_DUMP_METADATA = b"rl_dump"
"""Key of the Parquet metadata under which a dump states its contract."""

_Columns: TypeAlias = tuple[list[object], list[object] | None]
"""Lengths, and rollout ids where the file has them; not checked yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The two columns a plan needs."""

    total_lengths: IntArray
    """int64 [N], tokens of each sample."""
    rollout_ids: IntArray
    """int64 [N]; 0..N-1 where the file has none, one rollout per sample."""


def read_batch(path: Path) -> Batch:
    """Read lengths and rollout ids.

    - `.jsonl` (or any text): one integer per line, or one object with `total_length` and optionally
      `rollout_id`.
    - `.json`: a list of those, or an object of columns `total_lengths` and optionally
      `rollout_ids`.
    - `.parquet`: columns `total_lengths` and optionally `rollout_ids`, as in a `rollout-dump.v1`.

    Raises:
        ScheduleError: the file is missing, empty or malformed; says where.
        UnsupportedContractError: a dump of another contract.
    """
    if not path.is_file():
        raise ScheduleError(f"{path}: no such file")
    read = {".parquet": _read_parquet, ".json": _read_columns}.get(path.suffix, _read_lines)
    lengths, ids = read(path)
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


def read_json(path: Path, text: str, *, line: int | None = None) -> Any:
    """Parse JSON, or name the file and the line (`line`, where `text` is one line of it) at fault.

    Raises:
        ScheduleError: `text` is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleError(
            f"{path}: line {line or error.lineno} is not JSON: {error.msg}"
        ) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{path}: byte {error.start} is not UTF-8 text: give lengths as text, JSON or Parquet"
        ) from error


def _read_lines(path: Path) -> _Columns:
    lines = enumerate(_read_text(path).splitlines(), start=1)
    return _collect(
        path,
        ((f"line {n}", read_json(path, line, line=n)) for n, line in lines if line.strip()),
    )


def _read_columns(path: Path) -> _Columns:
    document = read_json(path, _read_text(path))
    if isinstance(document, list):
        return _collect(path, ((f"entry {number}", entry) for number, entry in enumerate(document)))
    columns = document if isinstance(document, dict) else {}
    lengths, ids = columns.get("total_lengths"), columns.get("rollout_ids")
    if not isinstance(lengths, list) or not (ids is None or isinstance(ids, list)):
        raise ScheduleError(
            f"{path}: expected a list of samples, or an object with lists total_lengths and"
            " rollout_ids"
        )
    return lengths, ids


def _read_parquet(path: Path) -> _Columns:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ScheduleError(
            f"{path}: reading Parquet needs the extra: pip install 'rl-schedule[parquet]'"
        ) from error
    try:
        file = parquet.ParquetFile(path)
        header = json.loads((file.metadata.metadata or {}).get(_DUMP_METADATA, b"{}"))
        # A file that states no contract is read as a dump: its columns decide.
        check_header({"contract": _DUMP, **header}, {_DUMP: _DUMP_MINOR}, where=str(path))
        found = file.schema_arrow.names
        if "total_lengths" not in found:
            raise ScheduleError(
                f"{path}: has no column total_lengths; columns are {', '.join(found)}"
            )
        names = [name for name in ("total_lengths", "rollout_ids") if name in found]
        columns = file.read(columns=names).to_pydict()
    except (ScheduleError, UnsupportedContractError):
        raise
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path}: not a readable Parquet file: {error}") from error
    return columns["total_lengths"], columns.get("rollout_ids")


def _collect(path: Path, entries: Iterable[tuple[str, object]]) -> _Columns:
    """Split entries into the two columns; either every entry has a rollout id or none has."""
    rows: list[tuple[object, object]] = []
    for where, entry in entries:
        named = entry if isinstance(entry, Mapping) else {"length": entry}
        length, rollout = _first(named, _LENGTH_KEYS), _first(named, _ID_KEYS)
        if isinstance(length, bool) or not isinstance(length, int):
            raise ScheduleError(
                f"{path}: {where} must be an integer or an object with {_LENGTH_KEYS[0]}, got"
                f" {entry!r:.80}"
            )
        if rows and (rollout is None) != (rows[0][1] is None):
            raise ScheduleError(
                f"{path}: {where} {'has no' if rollout is None else 'has a'} rollout_id, unlike"
                " the entries before it"
            )
        rows.append((length, rollout))
    ids = [rollout for _, rollout in rows if rollout is not None]
    return [length for length, _ in rows], ids or None


def _first(entry: Mapping[str, object], names: tuple[str, ...]) -> object:
    return next((entry[name] for name in names if entry.get(name) is not None), None)
