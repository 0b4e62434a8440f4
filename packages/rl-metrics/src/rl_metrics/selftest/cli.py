"""The self-test as a command: a table or JSON of what every layout gave.

The result goes to standard output, progress and errors to standard error. Exit codes: 0 all layouts
agree, 1 some do not, 2 the check could not run.
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
    from rl_metrics.selftest.layout_checks import LayoutCheck

__all__ = ["selftest"]


def selftest(
    *,
    processes: Annotated[
        int, typer.Option(min=1, max=16, help="Start at most this many ranks.")
    ] = 4,
    seed: Annotated[int, typer.Option(min=0, max=2**53, help="Which random step to run.")] = 0,
    deadline_seconds: Annotated[
        float,
        typer.Option(min=0.001, max=1e6, help="Give up on the ranks of one mesh after this long."),
    ] = 120.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
) -> None:
    """Run one random step on every layout with real processes and compare with the closed form."""
    console, errors = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    errors.print("loading torch", markup=False)
    try:
        from rl_metrics.selftest.layout_checks import check_layouts
    except ModuleNotFoundError as error:
        errors.print(
            f"the self-test needs torch ({error}): pip install 'rl-metrics[torch]'", markup=False
        )
        raise typer.Exit(2) from None
    try:
        checks = check_layouts(
            max_processes=processes,
            seed=seed,
            deadline_seconds=deadline_seconds,
            announce=lambda line: errors.print(line, markup=False),
        )
    except MetricsError as error:
        errors.print(f"the self-test could not run: {error}", markup=False)
        raise typer.Exit(2) from None
    agree = all(check.passes for check in checks)
    if as_json:
        told = [asdict(check) | {"worst": check.worst, "passes": check.passes} for check in checks]
        verdict = "agree" if agree else "differ"
        typer.echo(json.dumps({"seed": seed, "verdict": verdict, "checks": told}))
    else:
        _print_table(console, checks)
    raise typer.Exit(0 if agree else 1)


def _print_table(console: Console, checks: list[LayoutCheck]) -> None:
    """Print one row per check, every number of those that differ, and a verdict.

    A row fits into 80 columns; in fewer, cells fold.
    """
    table = Table(
        title="rl-metrics self-test: one step on every layout", box=None, padding=(0, 1, 0, 0)
    )
    columns = "dp,cp,layout,dtype,aggregation,loss,expected,loss\ndiff,gradient\ndiff,"
    for column in columns.split(","):
        is_text = column in ("layout", "dtype", "aggregation")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for check in checks:
        table.add_row(
            str(check.dp_size),
            str(check.cp_size),
            check.layout,
            check.dtype,
            check.aggregation,
            f"{check.value:.6g}",
            f"{check.expected:.6g}",
            f"{check.value_difference:.1e}",
            f"{check.gradient_difference:.1e}",
            "[green]ok[/]" if check.passes else "[red]FAIL[/]",
        )
    console.print(table)
    failed = [check for check in checks if not check.passes]
    for check in failed:
        console.print(_in_full(check), soft_wrap=True)
    value, gradient, whitening = (
        max(getattr(check, f"{name}_difference") for check in checks)
        for name in ("value", "gradient", "whitening")
    )
    verdict = (
        f"{len(failed)} of {len(checks)} checks differ"
        if failed
        else f"all {len(checks)} checks agree"
    )
    console.print(
        f"{verdict}; largest difference: loss {value:.1e}, gradient {gradient:.1e} (relative),"
        f" whitened values {whitening:.1e}",
        soft_wrap=True,
    )


def _in_full(check: LayoutCheck) -> str:
    """Tell everything one check compared."""
    return (
        f"dp {check.dp_size} cp {check.cp_size} {check.layout} {check.dtype} {check.aggregation}:"
        f" loss {check.value:.9g}, expected {check.expected:.9g}; relative difference of loss"
        f" {check.value_difference:.1e}, of gradient {check.gradient_difference:.1e}; absolute"
        f" difference of whitened values {check.whitening_difference:.1e}; responses restored"
        f" {'exactly' if check.gather_is_exact else 'WRONGLY'}"
    )
