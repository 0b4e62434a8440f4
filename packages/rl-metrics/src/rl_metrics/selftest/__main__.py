"""`python -m rl_metrics.selftest`, with the options of `rl-metrics selftest`."""

import typer

from rl_metrics.selftest.cli import selftest

if __name__ == "__main__":
    typer.run(selftest)
