"""The columns of a batch out of a user's file: CSV, JSON lines, JSON, or a Parquet rollout dump.

Parquet needs the extra `parquet`.

Invariant: a file that is not understood is refused with its path, its line and what was expected;
no sample is skipped.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy.typing as npt

from rl_schedule.arrays import (
    IntArray,
    cost_column,
    identifier_column,
    positive_column,
)
from rl_schedule.contract_header import check_header
from rl_schedule.errors import ScheduleError, UnsupportedContractError

__all__ = ["ACCEPTED_NAMES", "Batch", "read_batch", "read_json"]

_KEYS: Final = {
    "total_lengths": ("total_length", "total_lengths", "length"),
    "rollout_ids": ("rollout_id", "rollout_ids"),
    "sample_costs": ("sample_cost", "sample_costs"),
    "keep_together": ("keep_together",),
}
"""Columns, and what a file may call them."""

ACCEPTED_NAMES: Final = ", ".join(
    f"{names[0]} (or {', '.join(names[1:])})" if names[1:] else names[0] for names in _KEYS.values()
)
"""The names of columns that are read, for messages and help."""

_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_FRACTION = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)

_DUMP, _DUMP_MINOR = "rollout-dump.v1", 0
"""Contract of the Parquet files that are read, and its newest minor that was looked at."""

_DUMP_METADATA = b"rl_dump"
"""Key of the Parquet metadata under which a dump states its contract."""

_Columns: TypeAlias = tuple[dict[str, list[Any]], list[str]]
"""The columns that a file has, by their name in a request, not checked yet; what is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The columns of a request, as far as a file has them."""

    total_lengths: IntArray
    """int64 [N], tokens of each sample."""
    rollout_ids: IntArray
    """int64 [N]; 0..N-1 where the file has none, one rollout per sample."""
    rollout_names: tuple[str, ...] = ()
    """Strings behind rollout ids 0, 1, ... where the file has strings."""
    sample_costs: npt.NDArray[Any] | None = None
    """int64 or float64 [N], what each sample costs; None where the file does not say."""
    keep_together: IntArray | None = None
    """int64 [N], samples of one id share a micro-batch; None where the file does not say."""
    unused: tuple[str, ...] = ()
    """Names that the file has and nothing reads; none for a dump, whose columns are known."""

    def columns(self) -> dict[str, Any]:
        """Return the columns as keywords of a request."""
        return {name: getattr(self, name) for name in (*_KEYS, "rollout_names")}


def read_batch(path: Path) -> Batch:
    """Read lengths, and where there are any rollout ids, costs and what to keep together.

    Text is UTF-8, with or without a byte order mark. In every form `total_length` may have a
    `rollout_id`, a `sample_cost` and a `keep_together` beside it; other names are not read, and
    returned as `unused`.

    - `.csv`, `.tsv`: a header with these names, or one or two columns of integers without one,
      lengths and rollout ids.
    - `.jsonl` (or any text): one integer per line, or one object with these names.
    - `.json`: a list of those, or an object of columns `total_lengths`, `rollout_ids` and so on.
    - `.parquet`: columns `total_lengths`, `rollout_ids` and so on, as in a `rollout-dump.v1`.

    Raises:
        ScheduleError: the file is missing, empty or malformed; says where.
        UnsupportedContractError: a dump of another contract.
    """
    if not path.is_file():
        raise ScheduleError(f"{path}: no such file")
    read = {
        ".parquet": _read_parquet,
        ".json": _read_columns,
        ".csv": _read_csv,
        ".tsv": _read_csv,
    }.get(path.suffix.lower(), _read_lines)
    found, unused = read(path)
    lengths = found["total_lengths"]
    try:
        column = positive_column(lengths, "total_lengths")
        ids, names = identifier_column(found.get("rollout_ids", range(len(lengths))), "rollout_ids")
        costs, kept = found.get("sample_costs"), found.get("keep_together")
        batch = Batch(
            total_lengths=column,
            rollout_ids=ids,
            rollout_names=names,
            sample_costs=None if costs is None else cost_column(costs, "sample_costs"),
            keep_together=None if kept is None else identifier_column(kept, "keep_together")[0],
            unused=tuple(unused),
        )
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    if not column.size:
        raise ScheduleError(f"{path}: holds no samples")
    for name in ("rollout_ids", "sample_costs", "keep_together"):
        other = getattr(batch, name)
        if other is not None and other.size != column.size:
            raise ScheduleError(f"{path}: {column.size} total_lengths but {other.size} {name}")
    return batch


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
    except (ValueError, RecursionError) as error:  # Numbers or nesting beyond what Python reads.
        raise ScheduleError(f"{path}: line {line or 1} cannot be read as JSON: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
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
    found = {name: columns[name] for name in _KEYS if columns.get(name) is not None}
    if "total_lengths" not in found or not all(isinstance(c, list) for c in found.values()):
        raise ScheduleError(
            f"{path}: expected a list of samples, or an object with lists total_lengths and"
            " rollout_ids"
        )
    return found, [str(name) for name in columns if name not in found]


def _read_csv(path: Path) -> _Columns:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    lines = csv.reader(_read_text(path).splitlines(keepends=True), delimiter=delimiter)
    try:
        rows = [
            (lines.line_num, [cell.strip() for cell in row])
            for row in lines
            if any(map(str.strip, row))
        ]
    except csv.Error as error:
        raise ScheduleError(f"{path}: line {lines.line_num} is not CSV: {error}") from error
    if not rows:
        return {"total_lengths": []}, []
    header, rows = _split_header(path, rows)

    def entries() -> Iterator[tuple[str, object]]:
        for line, row in rows:
            if len(row) != len(header):
                raise ScheduleError(
                    f"{path}: line {line} has {len(row)} columns, the header has {len(header)}"
                )
            # Ids stay text until all of them are known: "7" beside "a" is a name.
            yield (
                f"line {line}",
                {
                    key: cell if key in ids or _number(cell) is None else _number(cell)
                    for key, cell in zip(header, row, strict=True)
                    if cell
                },
            )

    ids = {*_KEYS["rollout_ids"], *_KEYS["keep_together"]}
    found, unused = _collect(path, entries())
    for name in ("rollout_ids", "keep_together"):
        if name in found and all(isinstance(_number(cell), int) for cell in found[name]):
            found[name] = [_number(cell) for cell in found[name]]
    return found, unused


def _split_header(
    path: Path, rows: list[tuple[int, list[str]]]
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the names of the columns, and the rows below them; numbers need no header."""
    line, header = rows[0]
    names = _KEYS["total_lengths"]
    if any(_number(cell) is None for cell in header):
        if not set(names) & set(header):
            raise ScheduleError(
                f"{path}: has no column {names[0]}; columns are {', '.join(header)}"
            )
        return header, rows[1:]
    if len(header) > 2:
        raise ScheduleError(
            f"{path}: line {line} has {len(header)} columns and no header; begin with one that"
            f" names {names[0]}"
        )
    return ["total_length", "rollout_id"][: len(header)], rows


def _number(text: str) -> int | float | None:
    """Return an integer or a fraction; None for any other text."""
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
    except ValueError:  # More digits than Python reads.
        return None
    return float(text) if _FRACTION.fullmatch(text) else None


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
        is_dump = bool(header)
        if isinstance(header, dict):
            header = {"contract": _DUMP, **header}
        check_header(header, {_DUMP: _DUMP_MINOR}, where=str(path))
        found = file.schema_arrow.names
        if "total_lengths" not in found:
            raise ScheduleError(
                f"{path}: has no column total_lengths; columns are {', '.join(found)}"
            )
        columns = file.read(columns=[n for n in _KEYS if n in found]).to_pydict()
    except (ScheduleError, UnsupportedContractError):
        raise
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path}: not a readable Parquet file: {error}") from error
    return columns, [] if is_dump else [name for name in found if name not in columns]


def _collect(path: Path, entries: Iterable[tuple[str, object]]) -> _Columns:
    """Split entries into columns; either every entry has a value of a column or none has."""
    columns: dict[str, list[Any]] = {"total_lengths": []}
    unused: dict[str, None] = {}
    for row, (where, entry) in enumerate(entries):
        named = entry if isinstance(entry, Mapping) else {"length": entry}
        used = {name: _first(named, keys) for name, keys in _KEYS.items()}
        unused |= {str(key): None for key in named if key not in used.values()}
        values = {name: None if key is None else named[key] for name, key in used.items()}
        length = values["total_lengths"]
        if isinstance(length, bool) or not isinstance(length, int):
            raise ScheduleError(
                f"{path}: {where} must be an integer or an object with"
                f" {_KEYS['total_lengths'][0]}, got {entry!r:.80}"
            )
        for name, value in values.items():
            if row and (value is None) == (name in columns):
                raise ScheduleError(
                    f"{path}: {where} {'has no' if value is None else 'has a'} {_KEYS[name][0]},"
                    " unlike the entries before it"
                )
            if value is not None:
                columns.setdefault(name, []).append(value)
    return columns, list(unused)


def _first(entry: Mapping[str, object], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if entry.get(name) is not None), None)
