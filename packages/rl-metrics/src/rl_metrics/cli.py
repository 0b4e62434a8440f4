"""The command line: ``python -m rl_metrics.selftest``, also ``rl-metrics selftest``.

Layer: the outermost; the only module that imports typer and rich. Exit codes: 0 all layouts agree, 1 some do not, 2 the check could not run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rl_metrics.errors import MetricsError

if TYPE_CHECKING:
    from rl_metrics.torch.selftest import LayoutCheck

__all__ = ["app", "main", "selftest"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """Losses and metrics that no layout changes."""


@app.command()
def selftest(
    *,
    processes: Annotated[int, typer.Option(min=1, max=16, help="Start at most this many ranks.")] = 4,
    seed: Annotated[int, typer.Option(help="Which random step to run.")] = 0,
    deadline_seconds: Annotated[float, typer.Option(help="Give up on ranks after this long.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Run one random step on every layout with real processes and compare values and gradients with the closed form."""
    console, errors = Console(), Console(stderr=True)
    try:
        from rl_metrics.torch.selftest import check_layouts
    except ModuleNotFoundError as error:
        errors.print(f"the self-test needs torch ({error}): pip install 'rl-metrics\\[torch]'")
        raise typer.Exit(2) from None
    try:
        checks = check_layouts(max_processes=processes, seed=seed, deadline_seconds=deadline_seconds)
    except MetricsError as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps([asdict(check) | {"worst": check.worst, "passes": check.passes} for check in checks]))
    else:
        _print_table(console, checks)
    raise typer.Exit(0 if all(check.passes for check in checks) else 1)


def _print_table(console: Console, checks: list[LayoutCheck]) -> None:
    """Print one row per check and a verdict."""
    table = Table(title="rl-metrics self-test: one step on every layout")
    for column, justify in (("dp", "right"), ("cp", "right"), ("layout", "left"), ("dtype", "left"), ("aggregation", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for column in ("loss", "expected", "rel. diff. loss", "rel. diff. gradient", ""):
        table.add_column(column, justify="right")
    for check in checks:
        place = (str(check.dp_size), str(check.cp_size), check.layout, check.dtype, check.aggregation)
        numbers = (f"{check.value:.9g}", f"{check.expected:.9g}", f"{check.value_difference:.1e}", f"{check.gradient_difference:.1e}")
        table.add_row(*place, *numbers, "[green]ok[/]" if check.passes else "[red]DIFFERS[/]")
    console.print(table)
    failed = sum(not check.passes for check in checks)
    value = max(check.value_difference for check in checks)
    gradient = max(check.gradient_difference for check in checks)
    verdict = f"{failed} of {len(checks)} checks differ" if failed else f"all {len(checks)} checks agree"
    console.print(f"{verdict}; largest relative difference: loss {value:.1e}, gradient {gradient:.1e}")


def main() -> None:
    """Run the command line."""
    app()
