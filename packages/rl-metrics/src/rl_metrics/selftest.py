"""`python -m rl_metrics.selftest`: prove on this machine that layouts change neither losses,
gradients nor metrics.

Takes the options of `rl-metrics selftest`; see `rl_metrics.cli`.
"""

import typer

from rl_metrics.cli import selftest

__all__ = ["main"]


def main() -> None:
    """Run the self-test and exit 0 when all layouts agree, 1 when some differ, 2 when it could not run."""
    typer.run(selftest)


if __name__ == "__main__":
    main()
