"""What the command `rl-dump` is called with and how it ends.

Exit codes: 0 nothing to report, 1 something found, 2 an error, told in one line on standard error;
a wrong call also shows the usage.
"""

from rl_dump.cli.app import main

__all__ = ["main"]
