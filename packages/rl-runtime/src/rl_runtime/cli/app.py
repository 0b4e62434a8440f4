"""The command line.

Exit codes: 0 done, 1 the run failed or the doctor found a gap, 2 the recipe or the machine is wrong
(nothing was started), 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rl_runtime.config import Recipe, absolute_paths, load_recipe
from rl_runtime.errors import ConfigError, ReplayError, RuntimeSetupError
from rl_runtime.process.interrupts import ended_by_signals
from rl_runtime.process.supervisor import end_at_once, go_on_supervised

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
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override: section.key=value. May be repeated."),
    ] = None,
) -> None:
    """Train a model by a recipe."""
    # Until the run has a folder, there is no place for more than the one line that a person gets.
    logging.basicConfig(handlers=[logging.NullHandler()])
    with ended_by_signals():
        _train(recipe, set_ or ())


def _train(path: Path, overrides: Sequence[str]) -> None:
    # Without this Ray starts its workers through `uv run`, in a second environment; it is read when
    # Ray is imported.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    written = None
    try:
        recipe = _checked_recipe(path, overrides)
        written = recipe.run.dir
        _run(recipe)
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        kept = (
            f"; what was written is in {written}"
            if written is not None and written.exists()
            else ""
        )
        _errors.print(f"interrupted: everything was stopped{kept}", markup=False)
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    except Exception as error:
        # The boundary to a person: one line here, everything else in the log.
        logging.getLogger(__name__).exception("the run failed")
        _errors.print(f"error: {type(error).__name__}: {error}", markup=False)
        if written is not None and (written / "logs").exists():
            _errors.print(f"logs: {written / 'logs'}", markup=False)
        raise typer.Exit(_EXIT_FAILED) from None


def _checked_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    from rl_runtime.setup.preflight import check_before_start

    try:
        recipe = absolute_paths(load_recipe(path, overrides))
        check_before_start(recipe)
    except ConfigError as error:
        for line in str(error).splitlines():
            _errors.print(f"error: {line}", markup=False)
        raise typer.Exit(_EXIT_USAGE) from None
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


@app.command()
def replay(
    file: Annotated[
        Path, typer.Argument(help="One micro-batch, from `rl-dump replay TRAIN_DUMP FILE`.")
    ],
    model: Annotated[
        Path,
        typer.Option(
            help=(
                "Hugging Face folder of the weights that the batch began with; for batch 0 the"
                " run's warm_start."
            )
        ),
    ],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference that is accepted, nats.")
    ] = 1e-5,
) -> None:
    """Run one dumped micro-batch again, on the CPU.

    Exits 1 when a log-prob differs by more than the tolerance.
    """
    # Before torch is loaded: this runs on the CPU, also beside a training run that has the GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # What libraries have to say about missing GPUs is not what was asked for.
    logging.basicConfig(handlers=[logging.NullHandler()])
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    from rl_dump import DumpError
    from rl_runtime.stages.replay import replay as replay_micro_batch

    try:
        given, found = replay_micro_batch(file, model)
    except (DumpError, ReplayError, RuntimeSetupError) as error:
        _errors.print(f"error: {error}", markup=False)
        raise typer.Exit(_EXIT_USAGE) from None
    console = Console(highlight=False, soft_wrap=True)
    table = Table.grid("", "", padding=(0, 2))
    table.add_row(
        "micro-batch",
        f"batch {given.batch_id}, step {given.step}, rank {given.data_parallel_rank}, micro-batch"
        f" {given.micro_batch}",
    )
    table.add_row("compared", f"{found.num_samples} samples, {found.num_tokens} tokens")
    table.add_row("largest difference", f"{found.largest:.1e} nats")
    if found.token is not None:
        table.add_row("where", f"rollout position {found.rollout_position}, token {found.token}")
        table.add_row("log-prob", f"{found.dumped:.7f} dumped, {found.replayed:.7f} replayed")
    console.print(table)
    if found.largest > tolerance:
        console.print(
            f"a log-prob differs by more than {tolerance:g}: other weights than the batch began"
            " with, or other code",
            markup=False,
        )
        raise typer.Exit(_EXIT_FAILED)


@app.command()
def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether this machine can run what is installed: contracts, versions, Python, ports, GPUs, Ray, disk. Exits 1 on a gap."""
    from rl_runtime.setup.doctor import diagnose, report_document

    found = diagnose()
    if json_:
        typer.echo(json.dumps(report_document(found), indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for finding in found.findings:
            console.print(
                f"{finding.status:>4}  {finding.area:<10} {finding.message}",
                markup=False,
                style="bold red" if finding.status == "gap" else None,
            )
    if found.has_gap:
        raise typer.Exit(_EXIT_FAILED)


def main() -> None:
    """Run the command line; a training run in a process of its own."""
    supervised = sys.argv[1:2] == ["train"] and go_on_supervised(failed=_EXIT_FAILED)
    try:
        app()
    except SystemExit as end:
        if not supervised:
            raise
        end_at_once(end.code if isinstance(end.code, int) else _EXIT_FAILED if end.code else 0)


if __name__ == "__main__":
    main()
