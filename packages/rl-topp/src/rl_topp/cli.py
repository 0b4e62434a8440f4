"""The command line `rl-topp`: `stats` and `sglang-check`.

Names, paths and messages are text, never markup. Exit codes: 0 fine, 1 the check found something, 2
bad input (one line, no traceback).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_topp.errors import NucleusError, UnsupportedContractError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Kept sets of top-p sampling: look into a dump, check the SGLang plugin.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # `rl-topp[parquet]` in a help text is a name, no markup
)

_LABELS = {
    "num_tokens": "trained tokens",
    "num_kept": "with a kept set",
    "num_no_filter": "without a filter",
    "num_truncated": "set lost in transport",
    "mean_size": "kept ids, mean",
    "median_size": "kept ids, median",
    "p99_size": "kept ids, p99",
    "singleton_fraction": "singletons",
    "wire_bytes_per_token": "bytes per token on the wire",
    "mean_kept_mass": "kept mass, mean",
    "mean_log_ratio_without_replay": "log-ratio without replay, mean",
    "max_log_ratio_without_replay": "log-ratio without replay, max |.|",
    "mean_log_ratio_with_replay": "log-ratio with replay, mean",
    "max_log_ratio_with_replay": "log-ratio with replay, max |.|",
}


@app.command()
def stats(
    dump: Annotated[Path, typer.Argument(help="A dump in Parquet form, with kept sets.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Summarise the kept sets of a dump: sizes, bytes, kept mass, log-ratios.

    Needs the extra `rl-topp[parquet]`.
    """
    try:
        from rl_topp.parquet import stats_of_dump
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is not installed; install rl-topp[parquet]")
    try:
        figures = dataclasses.asdict(stats_of_dump(dump))
    except (NucleusError, UnsupportedContractError) as error:
        _fail(str(error))
    if as_json:
        typer.echo(json.dumps(figures, allow_nan=False))
        return
    table = Table(title=Text(str(dump)), show_header=False)
    for name, label in _LABELS.items():
        table.add_row(label, _shown(figures[name]))
    Console().print(table)


@app.command("sglang-check")
def sglang_check() -> None:
    """Print what the plugin supports with the installed SGLang; exit 1 when it cannot be used."""
    from rl_topp.sglang.check import main as check

    raise typer.Exit(check())


def main() -> None:
    """Run the command line."""
    app()


def _shown(value: Any) -> str:
    if value is None:
        return "no data"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _fail(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(
        f"rl-topp: {' '.join(message.split())}", markup=False, highlight=False
    )
    raise typer.Exit(2)
