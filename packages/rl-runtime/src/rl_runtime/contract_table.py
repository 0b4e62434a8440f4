"""Which contracts the installed distributions write and read, from package metadata only.

A distribution names its contracts in the entry-point groups `rl.contracts.writes` and
`rl.contracts.reads`, one entry per id. Nothing that an entry points to is imported.

Invariants, each matched by a test in `tests/contracts` or `tests/unit/test_contract_table.py`:
`gaps` is empty for a complete installation and otherwise names the id, who writes it, who reads it
and what to do; `differences` finds a rank with other versions or contracts, whichever it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import TypedDict

from rl_runtime.errors import RuntimeSetupError

__all__ = [
    "READS_GROUP",
    "WRITES_GROUP",
    "ContractTable",
    "differences",
    "gaps",
    "installed_contracts",
    "refuse_mixed_cluster",
]

WRITES_GROUP = "rl.contracts.writes"
"""Entry-point group of the ids that a distribution writes, and so owns."""
READS_GROUP = "rl.contracts.reads"
"""Entry-point group of the ids that a distribution reads."""
_PACKAGES = frozenset({"rl-schedule", "rl-metrics", "rl-dump", "rl-topp", "rl-runtime"})
"""Distributions whose versions count even where they have no contract.

Records of theirs travel between the actors of a run as they are.
"""


class ContractTable(TypedDict):
    """The contracts of one Python installation; plain JSON, so that ranks can send it."""

    versions: dict[str, str]
    """Version by distribution: our own, and every other that writes or reads a contract."""
    writes: dict[str, list[str]]
    """By contract id: the distributions that write it, sorted."""
    reads: dict[str, list[str]]
    """By contract id: the distributions that read it, sorted."""


def installed_contracts(path: Sequence[str] | None = None) -> ContractTable:
    """Read the table of this installation.

    Args:
        path: folders to look in; `sys.path` where None.

    Returns:
        The table. A distribution that is found twice counts as Python would import it: the first
        one.
    """
    table: ContractTable = {"versions": {}, "writes": {}, "reads": {}}
    found = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    seen: set[str] = set()
    for distribution in found:
        name = str(distribution.metadata["Name"]).lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        if name in _PACKAGES:
            table["versions"][name] = distribution.version
        for entry in distribution.entry_points:
            if entry.group in {WRITES_GROUP, READS_GROUP}:
                ids = table["writes"] if entry.group == WRITES_GROUP else table["reads"]
                ids[entry.name] = sorted({*ids.get(entry.name, []), name})
                table["versions"][name] = distribution.version
    return table


def gaps(table: ContractTable) -> list[str]:
    """List the contracts that do not meet.

    Read but not written, written but not read, or written twice.

    Returns:
        One sentence per gap, in the order of the ids.
    """
    found = []
    for contract in sorted({*table["writes"], *table["reads"]}):
        writers, readers = table["writes"].get(contract, []), table["reads"].get(contract, [])
        if not writers:
            found.append(
                f"{contract} is read by {_names(readers, table)}, but nothing installed writes"
                f" it{_other_majors(contract, table['writes'])}"
            )
        elif not readers:
            found.append(
                f"{contract} is written by {_names(writers, table)}, but nothing installed reads"
                f" it{_other_majors(contract, table['reads'])}"
            )
        if len(writers) > 1:
            found.append(
                f"{contract} is written by {_names(writers, table)}: a contract has one owner;"
                " uninstall the other"
            )
    return found


def differences(tables: Mapping[str, ContractTable]) -> list[str]:
    """Compare versions and contracts of all ranks with those of the first one.

    Args:
        tables: by rank, such as "trainer rank 3"; the first is what the others are held to.

    Returns:
        One sentence per rank and group that differ; empty when all agree.
    """
    if not tables:
        return []
    (first, expected), *others = tables.items()
    found = []
    for rank, table in others:
        if table["versions"] != expected["versions"]:
            found.append(
                f"{rank} has {_versions(table)} where {first} has {_versions(expected)}: install"
                " the same versions on every node"
            )
        for verb in ("writes", "reads"):
            ours, theirs = _pairs(expected, verb), _pairs(table, verb)
            if ours != theirs:
                extra, lacking = sorted(theirs - ours), sorted(ours - theirs)
                found.append(
                    f"{rank} {verb} {_listed(extra)} where {first} {verb} {_listed(lacking)}"
                    f" ({_versions(table)} against {_versions(expected)}): install the same"
                    " versions on every node"
                )
    return found


def refuse_mixed_cluster(tables: Mapping[str, ContractTable]) -> None:
    """Compare all ranks before the first step; see `differences`.

    Equal contracts are not enough: between actors, records travel as themselves.

    Raises:
        RuntimeSetupError: a rank has other versions or contracts; the message names all of them.
    """
    found = differences(tables)
    if found:
        raise RuntimeSetupError("mixed cluster: " + "; ".join(found))


def _pairs(table: ContractTable, verb: str) -> set[tuple[str, str]]:
    ids = table["writes"] if verb == "writes" else table["reads"]
    return {(contract, name) for contract, names in ids.items() for name in names}


def _listed(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{contract} ({name})" for contract, name in pairs) or "nothing"


def _versions(table: ContractTable) -> str:
    return (
        ", ".join(f"{name} {version}" for name, version in sorted(table["versions"].items()))
        or "none of our packages"
    )


def _names(names: Iterable[str], table: ContractTable) -> str:
    return ", ".join(f"{name} {table['versions'][name]}" for name in names)


def _other_majors(contract: str, ids: Mapping[str, list[str]]) -> str:
    family = contract.rpartition(".v")[0]
    others = sorted(
        other for other in ids if other.rpartition(".v")[0] == family and other != contract
    )
    return (
        f"; {', '.join(others)} is there: install versions that were released together"
        if others
        else ": install the package that does"
    )
