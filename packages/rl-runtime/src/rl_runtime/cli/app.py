"""The command line: one page for each command, put together.

Heavy libraries are loaded by the command that needs them, when it runs.
"""

from __future__ import annotations

import sys

import typer

from rl_runtime.cli.doctor import doctor
from rl_runtime.cli.endings import FAILED
from rl_runtime.cli.replay import replay
from rl_runtime.cli.report import report
from rl_runtime.cli.train import train
from rl_runtime.process.supervisor import end_at_once, go_on_supervised

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for _command in (train, report, replay, doctor):
    app.command()(_command)


@app.callback()
def _root() -> None:
    """Post-training of language models by reinforcement learning.

    With Megatron-Core, SGLang and Ray.
    """


def main() -> None:
    """Run the command line; a training run in a process of its own."""
    supervised = sys.argv[1:2] == ["train"] and go_on_supervised(failed=FAILED)
    try:
        app()
    except SystemExit as end:
        if not supervised:
            raise
        end_at_once(end.code if isinstance(end.code, int) else FAILED if end.code else 0)


if __name__ == "__main__":
    main()
