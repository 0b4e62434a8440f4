"""The command line. Layer: top.

Exit codes: 0 done, 1 the run failed, 2 the recipe or the machine is wrong (nothing was started), 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from rl_runtime.config import load_recipe
from rl_runtime.errors import ConfigError

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)
_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130


@app.callback()
def _root() -> None:
    """Reinforcement-learning post-training of language models with Megatron-Core, SGLang and Ray."""


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="TOML recipe, such as recipes/quickstart.toml.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value. May be repeated.")] = None,
) -> None:
    """Train a model by a recipe."""
    from rl_runtime.preflight import check_before_start

    try:
        loaded = load_recipe(recipe, set_ or ())
        check_before_start(loaded)
    except ConfigError as error:
        for line in str(error).splitlines():
            _errors.print(f"error: {line}", markup=False)
        raise typer.Exit(_EXIT_USAGE) from None
    # Without this Ray starts its workers through `uv run`, in a second environment; it is read when Ray is imported.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    _interrupt_on_terminate()
    from rl_runtime.loop import run_training
    from rl_runtime.tracking.console import Display
    from rl_runtime.tracking.report import write_report
    from rl_runtime.tracking.tracker import read_metrics

    start = time.monotonic()
    display = Display()
    try:
        with display:
            run_training(loaded, display)
    except KeyboardInterrupt:
        _errors.print(f"interrupted: everything was stopped; what was written is in {loaded.run.dir}", markup=False)
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    except Exception as error:
        # The boundary to a person: one line here, everything else in the log.
        logging.getLogger(__name__).exception("the run failed")
        _errors.print(f"error: {type(error).__name__}: {error}", markup=False)
        _errors.print(f"logs: {loaded.run.dir / 'logs'}", markup=False)
        raise typer.Exit(_EXIT_FAILED) from None
    display.curve(read_metrics(loaded.run.dir))
    display.print(f"done in {(time.monotonic() - start) / 60:.1f} minutes: {loaded.run.dir}")
    if loaded.tracking.report:
        display.print(f"report: {write_report(loaded.run.dir)}")


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Write report.html for a run."""
    from rl_runtime.tracking.report import write_report

    try:
        path = write_report(run_dir)
    except OSError as error:
        _errors.print(f"error: {run_dir}: {error.strerror or error}", markup=False)
        raise typer.Exit(_EXIT_USAGE) from None
    typer.echo(str(path))


def _interrupt_on_terminate() -> None:
    def interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    sys.exit(app())
