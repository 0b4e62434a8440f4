"""Fails when nox skipped a session for want of an interpreter that is there.

Usage: skipped.py REPORT VERSION... - REPORT is the file of `nox --report`, VERSIONs are the
interpreters of this machine, such as 3.10.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["skipped_though_present"]


def skipped_though_present(
    report: dict[str, list[dict[str, Any]]], present: list[str]
) -> list[str]:
    """Name the sessions of a nox report that were skipped although their interpreter is present."""
    skipped = [
        (", ".join(session["signatures"]), session["reason"])
        for session in report["sessions"]
        if session["result"] == "skipped"
    ]
    return [
        name for name, reason in skipped if any(f" {version} " in reason for version in present)
    ]


if __name__ == "__main__":
    wrong = skipped_though_present(
        json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2:]
    )
    for name in wrong:
        sys.stderr.write(
            f"{name}: skipped, but its interpreter is installed: uv does not find it\n"
        )
    sys.exit(1 if wrong else 0)
