"""`rl-runtime train`: check a recipe, run it, write its report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rl_runtime.cli.endings import FAILED, INTERRUPTED, USAGE, end
from rl_runtime.config import Recipe, absolute_paths, load_recipe
from rl_runtime.errors import ConfigError
from rl_runtime.process.interrupts import ended_by_signals

__all__ = ["train"]


def train(
    recipe: Annotated[Path, typer.Argument(help="TOML recipe, such as recipes/quickstart.toml.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override: section.key=value. May be repeated."),
    ] = None,
) -> None:
    """Train a model by a recipe."""
    # Until the run has a folder, there is no place for more than the one line that a person gets.
    logging.basicConfig(handlers=[logging.NullHandler()])
    # Without this Ray starts its workers through `uv run`, in a second environment; it is read when
    # Ray is imported.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    with ended_by_signals():
        _train(recipe, set_ or ())


def _train(path: Path, overrides: Sequence[str]) -> None:
    run_dir = None
    try:
        recipe = _checked_recipe(path, overrides)
        run_dir = recipe.run.dir
        _run(recipe)
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        kept = f"; what was written is in {run_dir}" if run_dir and run_dir.exists() else ""
        end(INTERRUPTED, f"interrupted: everything was stopped{kept}")
    except Exception as error:
        # The boundary to a person: one line here, everything else in the log.
        logging.getLogger(__name__).exception("the run failed")
        logs = [f"logs: {run_dir / 'logs'}"] if run_dir and (run_dir / "logs").exists() else []
        end(FAILED, f"error: {type(error).__name__}: {error}", *logs)


def _checked_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    from rl_runtime.setup.preflight import check_before_start

    try:
        recipe = absolute_paths(load_recipe(path, overrides))
        check_before_start(recipe)
    except ConfigError as error:
        end(USAGE, *(f"error: {line}" for line in str(error).splitlines()))
    return recipe


def _run(recipe: Recipe) -> None:
    from rl_runtime.stages.reinforce import run_training
    from rl_runtime.tracking.console import Display
    from rl_runtime.tracking.report import write_report
    from rl_runtime.tracking.tracker import read_metrics

    start = time.monotonic()
    display = Display()
    with display:
        run_training(recipe, display)
    display.curve(read_metrics(recipe.run.dir))
    display.print(f"done in {(time.monotonic() - start) / 60:.1f} minutes: {recipe.run.dir}")
    if recipe.tracking.report:
        display.print(f"report: {write_report(recipe.run.dir)}")
