"""Builds the next entry of every package's changelog from its fragments, as a draft.

A fragment is a file `packages/rl-x/changes/NAME.TYPE.md`; the types are those of `[tool.towncrier]`
in `pyproject.toml`. A file of another type or name is an error of towncrier's.

Usage: changelogs.py [--show]. Exits 1 when the fragments of a package are not valid.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["draft"]

ROOT = Path(__file__).resolve().parent.parent


def draft(package: Path, config: Path = ROOT / "pyproject.toml") -> tuple[int, str]:
    """Build one package's next entry; returns towncrier's exit status and what it printed."""
    options = ["--draft", "--version", "next", "--name", package.name]
    options += ["--config", str(config), "--dir", str(package)]
    done = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def main() -> int:
    """Check all packages; returns the exit status."""
    worst = 0
    for package in sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")):
        status, printed = draft(package)
        if status or "--show" in sys.argv:
            sys.stdout.write(f"{package.name}\n{printed}\n")
        worst = max(worst, status)
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main())
