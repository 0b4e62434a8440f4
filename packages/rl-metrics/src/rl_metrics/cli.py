"""The command line `rl-metrics`, whose one command is the self-test."""

import typer

from rl_metrics.selftest.cli import selftest

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(selftest)


@app.callback()
def _root() -> None:
    """Losses and metrics that no layout changes."""


def main() -> None:
    """Run the command line."""
    app()
