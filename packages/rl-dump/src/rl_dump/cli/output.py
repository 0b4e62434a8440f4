"""How results are printed: a rich table for people, JSON for programs, one line for an error.

What comes from a file is text: it is never read as markup, and its control characters are shown,
not sent to the terminal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_dump.errors import DumpError, UnsupportedContractError
from rl_dump.tools.plain_json import plain_json

__all__ = [
    "counted",
    "error_line",
    "print_line",
    "print_result",
    "print_table",
    "print_warnings",
    "visible",
]


def print_result(
    value: object, *, as_json: bool, show: Callable[[], None], found: bool = False
) -> None:
    """Print a command's result, for programs or for people.

    Args:
        value: the result.
        as_json: print it as one JSON document: arrays as lists, non-finite numbers as strings.
        show: prints it for people.
        found: there is something to report: ends with exit code 1.
    """
    if as_json:
        text = json.dumps(plain_json(value), ensure_ascii=False, allow_nan=False)
        typer.echo(_UNPRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", text))
    else:
        show()
    if found:
        raise typer.Exit(1)


def print_line(text: str) -> None:
    """Print one line without markup."""
    _console().print(visible(text), markup=False, highlight=False, soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; numbers are right-aligned, only the last column is wrapped."""
    shown = [[visible(cell(value)) for value in row] for row in rows]
    table = Table(
        title=Text(visible(title)),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for index, name in enumerate(columns):
        numeric = bool(shown) and all(
            row[index][:1].isdigit() or row[index][:1] in {"-", ""} for row in shown
        )
        last = index == len(columns) - 1
        table.add_column(
            Text(visible(name)),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=not last,
        )
    for row in shown:
        table.add_row(*map(Text, row))
    _console().print(table)


def _console() -> Console:
    # Piped output is read by programs and pagers: it is not cut at 80 columns.
    console = Console()
    return console if console.is_terminal else Console(width=200)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 alarm`, `2 alarms`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def visible(text: str) -> str:
    r"""Show control characters and lone surrogates as Python writes them.

    An escape sequence is `a\x1b[31m`, a line end `a\nb`.
    """
    return _UNPRINTABLE.sub(
        lambda found: found.group().encode("unicode_escape").decode("ascii"), text
    )


def cell(value: object) -> str:
    """Show one value: floats with five digits, None as a dash."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


@contextlib.contextmanager
def print_warnings(logger: logging.Logger) -> Iterator[None]:
    """Print the package's warnings as one line each on standard error while the block runs."""
    handler = logging.StreamHandler()
    handler.setFormatter(_VisibleFormatter("rl-dump: warning: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def error_line() -> Iterator[None]:
    """End with exit code 2 and one line on standard error where the block fails.

    That is: a dump or an argument that cannot be used, or more memory than there is.
    """
    try:
        yield
    except (DumpError, UnsupportedContractError, MemoryError) as error:
        said = visible(" ".join(str(error).split()))
        if isinstance(error, MemoryError):
            said = f"not enough memory: {said or 'the dump is too large for this machine'}"
        typer.echo(f"rl-dump: {said}", err=True)
        raise typer.Exit(2) from None
