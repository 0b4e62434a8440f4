"""`python -m rl_metrics.selftest`, with the options of `rl-metrics selftest`."""

import typer

from rl_metrics.selftest.cli import selftest

__all__ = ["main"]


def main() -> None:
    """Run the self-test; exit 0 when layouts agree, 1 when some differ, 2 when it could not run."""
    typer.run(selftest)


if __name__ == "__main__":
    main()
