"""`rl-runtime report`: write the page of a run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_runtime.cli.endings import USAGE, end

__all__ = ["report"]


def report(run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Write report.html for a run."""
    from rl_runtime.tracking.report import write_report

    try:
        path = write_report(run_dir)
    except OSError as error:
        end(USAGE, f"error: {run_dir}: {error.strerror or error}")
    typer.echo(str(path))
