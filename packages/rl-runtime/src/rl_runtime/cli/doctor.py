"""`rl-runtime doctor`: what this machine lacks, before anything is started."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from rl_runtime.cli.endings import FAILED, end

__all__ = ["doctor"]


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether this machine can run what is installed here.

    Looks at contracts, versions, Python, ports, GPUs, Ray and disk. Exits 1 on a gap.
    """
    from rl_runtime.setup.doctor import diagnose, report_document

    found = diagnose()
    if json_:
        typer.echo(json.dumps(report_document(found), indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for finding in found.findings:
            console.print(
                f"{finding.status:>4}  {finding.area:<10} {finding.message}",
                markup=False,
                style="bold red" if finding.status == "gap" else None,
            )
    if found.has_gap:
        end(FAILED)
