"""How a command ends: exit codes, and one line on standard error for what went wrong.

Exit codes: 0 done; 1 the run failed, the doctor found a gap or a replay differs; 2 the recipe, a
file or the machine is wrong, and nothing was started; 130 interrupted.
"""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

__all__ = ["FAILED", "INTERRUPTED", "USAGE", "end"]

FAILED = 1
USAGE = 2
INTERRUPTED = 130

_errors = Console(stderr=True, highlight=False, soft_wrap=True)


def end(code: int, *lines: str) -> NoReturn:
    """Print lines on standard error and end the command."""
    for line in lines:
        _errors.print(line, markup=False)
    raise typer.Exit(code)
