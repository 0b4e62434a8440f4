"""Can this machine run what is installed here: contracts, versions, Python, ports, GPUs, Ray, disk.

Decides from package metadata and the operating system alone: no heavy library is imported, nothing
is started, every wait has a deadline.

Invariants: a report with a gap says what to do about it; a machine without GPUs has no gap, since
it can train on its CPU.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rl_runtime.contract_table import ContractTable, gaps, installed_contracts
from rl_runtime.errors import RuntimeSetupError
from rl_runtime.process.ports import check_answers, choose_port

__all__ = ["Finding", "Report", "diagnose", "report_document"]

_DISTRIBUTION = "rl-runtime"
_OLDEST_PYTHON = (3, 12)
_MIN_FREE_BYTES = 2 * 1024**3
"""A quick start writes 100 MB.

With less than this, a checkpoint or Ray's spilled objects fill the disk within a run.
"""
_MIN_SHARED_MEMORY_BYTES = 256 * 1024**2
"""Ray's object store lives in /dev/shm and holds one batch per data-parallel rank."""
_COMMAND_SECONDS = 2.0
"""For nvidia-smi, which hangs where a driver does."""
_CONNECT_SECONDS = 1.0
"""For this machine, and for a cluster's head."""
_LOOPBACK = "127.0.0.1"
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?\s*(==\s*(?P<version>[^;,\s]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    area: Literal["contracts", "versions", "python", "ports", "gpus", "ray", "disk"]
    """What it belongs to."""
    status: Literal["ok", "note", "gap"]
    """`gap`: a run would fail, or could not be trusted."""
    message: str
    """What was found; for a gap also what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that `rl-runtime doctor` shows."""

    contracts: ContractTable
    """Who writes and reads what."""
    findings: tuple[Finding, ...]
    """All findings, area by area."""

    @property
    def has_gap(self) -> bool:
        """Say whether anything is wrong."""
        return any(finding.status == "gap" for finding in self.findings)


def diagnose(folder: Path = Path()) -> Report:
    """Look at this machine.

    Args:
        folder: where runs would be written.

    Returns:
        The report; nothing is raised for what is wrong.
    """
    table = installed_contracts()
    findings = (
        *_contracts(table),
        *_versions(),
        _python(),
        _ports(),
        _gpus(),
        _ray(),
        *_disk(folder),
    )
    return Report(contracts=table, findings=findings)


def report_document(report: Report) -> dict[str, Any]:
    """Return a report as plain JSON values."""
    return {
        "ok": not report.has_gap,
        "contracts": dict(report.contracts),
        "findings": [asdict(finding) for finding in report.findings],
    }


def _contracts(table: ContractTable) -> Iterator[Finding]:
    for contract in sorted({*table["writes"], *table["reads"]}):
        writers, readers = table["writes"].get(contract, []), table["reads"].get(contract, [])
        yield Finding(
            area="contracts",
            status="ok" if writers and readers else "note",
            message=(
                f"{contract}: written by {', '.join(writers) or 'nothing'}, read by"
                f" {', '.join(readers) or 'nothing'}"
            ),
        )
    for gap in gaps(table):
        yield Finding(area="contracts", status="gap", message=gap)
    if not table["writes"]:
        yield Finding(
            area="contracts",
            status="gap",
            message=(
                "no installed package writes a contract: install rl-runtime with pip, not by path"
                " alone"
            ),
        )


def _versions() -> Iterator[Finding]:
    try:
        required = [
            line for line in metadata.requires(_DISTRIBUTION) or [] if "extra ==" not in line
        ]
    except metadata.PackageNotFoundError:
        yield Finding(
            area="versions",
            status="gap",
            message=f"{_DISTRIBUTION} is not installed: pip install {_DISTRIBUTION}",
        )
        return
    for line in required:
        match = _PIN.match(line)
        assert match is not None, line
        name, pinned = match["name"], match["version"]
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(
                area="versions",
                status="gap",
                message=f"{name} is not installed: pip install '{line}'",
            )
            continue
        wrong = pinned is not None and found.partition("+")[0] != pinned
        advice = (
            f", but {_DISTRIBUTION} is tested with {pinned}: pip install '{line}'" if wrong else ""
        )
        yield Finding(
            area="versions", status="gap" if wrong else "ok", message=f"{name} {found}{advice}"
        )


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _OLDEST_PYTHON:
        return Finding(
            area="python",
            status="gap",
            message=f"Python {found}: Megatron-Core needs 3.12 or newer",
        )
    return Finding(area="python", status="ok", message=f"Python {found} at {sys.executable}")


def _ports() -> Finding:
    try:
        port = choose_port(_LOOPBACK)
        with socket.create_server((_LOOPBACK, port)):
            check_answers(f"{_LOOPBACK}:{port}", timeout_seconds=_CONNECT_SECONDS)
    except (OSError, RuntimeSetupError) as error:
        return Finding(
            area="ports",
            status="gap",
            message=(
                f"no port on {_LOOPBACK} can be opened and reached ({error}): engines and trainers"
                " need some"
            ),
        )
    return Finding(
        area="ports",
        status="ok",
        message=f"a free port on {_LOOPBACK} can be opened and reached",
    )


def _gpus() -> Finding:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding(
            area="gpus", status="note", message=f"none found: runs use {os.cpu_count()} CPU cores"
        )
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(
            query, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            area="gpus",
            status="gap",
            message=f"nvidia-smi does not answer ({error}): repair the driver, or hide the GPUs",
        )
    lines = output.strip().splitlines()
    return Finding(
        area="gpus", status="ok", message=f"{len(lines)}: {'; '.join(sorted(set(lines)))}"
    )


def _ray() -> Finding:
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        check_answers(address, timeout_seconds=_CONNECT_SECONDS)
    except ValueError:
        return Finding(
            area="ray",
            status="ok",
            message="no cluster named in RAY_ADDRESS: a run starts its own on this machine",
        )
    except OSError as error:
        return Finding(
            area="ray",
            status="gap",
            message=(
                f"RAY_ADDRESS = {address} does not answer ({error}): start the cluster or unset it"
            ),
        )
    return Finding(area="ray", status="ok", message=f"RAY_ADDRESS = {address} answers")


def _disk(folder: Path) -> Iterator[Finding]:
    for path, smallest, use in (
        (folder.resolve(), _MIN_FREE_BYTES, "runs"),
        (Path("/dev/shm"), _MIN_SHARED_MEMORY_BYTES, "Ray's object store"),  # noqa: S108
    ):
        if not path.exists():
            continue
        free = shutil.disk_usage(path).free
        text = f"{path}: {free / 1024**3:.1f} GiB free for {use}"
        short = free < smallest
        yield Finding(
            area="disk",
            status="gap" if short else "ok",
            message=text + (f", less than {smallest / 1024**3:.2f}: make room" if short else ""),
        )
