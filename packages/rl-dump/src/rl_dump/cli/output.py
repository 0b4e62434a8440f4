"""Decide how results are printed: a rich table for people, JSON for programs, one line for an error.

Layer: cli.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rl_dump.errors import DumpError
from rl_dump.ragged import RaggedArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["counted", "error_line", "print_json", "print_line", "print_table", "print_warnings"]


def print_json(value: object) -> None:
    """Print one JSON document; arrays as lists, non-finite numbers as strings."""
    typer.echo(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def print_line(text: str) -> None:
    """Print one line without markup."""
    _console().print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; numbers are right-aligned, only the last column is wrapped."""
    shown = [[cell(value) for value in row] for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        numeric = bool(shown) and all(row[index][:1].isdigit() or row[index][:1] in {"-", ""} for row in shown)
        last = index == len(columns) - 1
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=not last)
    for row in shown:
        table.add_row(*(text.replace("[", r"\[") for text in row))
    _console().print(table)


def _console() -> Console:
    # Piped output is read by programs and pagers: it is not cut at 80 columns.
    console = Console()
    return console if console.is_terminal else Console(width=200)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 alarm`, `2 alarms`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def cell(value: object) -> str:
    """Show one value: floats with five digits, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


def plain(value: object) -> Any:
    """Turn a result into what JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, RaggedArray)):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, RaggedArray)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


@contextlib.contextmanager
def print_warnings(logger: logging.Logger) -> Iterator[None]:
    """Print the package's warnings as one line each on standard error while the block runs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("rl-dump: warning: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def error_line() -> Iterator[None]:
    """End with exit code 2 and one line on standard error when the block raises a `DumpError`."""
    try:
        yield
    except DumpError as error:
        typer.echo(f"rl-dump: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
