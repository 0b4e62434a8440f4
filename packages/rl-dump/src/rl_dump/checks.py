"""Whether a dump's samples agree with each other: lengths, positions, shards.

`Dump.verify` runs these after the checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_dump.columns.alignment import alignment_problems
from rl_dump.columns.fields import Column
from rl_dump.contract import DumpHeader

__all__ = ["Problem", "placed_positions", "structure_problems"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a dump.

    Example: `Problem(code="checksum", message="advantages: row group 3 is damaged",
    field="advantages")`.
    """

    code: str
    """Stable name of the kind of problem."""
    message: str
    """What is wrong, and where."""
    field: str | None = None
    """The field, if the problem is one field's."""
    row: int | None = None
    """The first row concerned, 0-based, if the problem is a sample's."""


def structure_problems(header: DumpHeader, columns: Mapping[str, Column]) -> list[Problem]:
    """List every disagreement between a dump's columns, and between them and its header.

    Args:
        header: the dump's header.
        columns: all its columns.
    """
    problems = [Problem(code="alignment", message=text) for text in alignment_problems(columns)]
    column = columns.get("rollout_position")
    positions = None
    if column is not None and column.valid is None:
        positions = np.asarray(column.values)
    if positions is not None:
        problems += _position_problems(header, positions)
    return problems + _shard_problems(header, positions)


def _position_problems(header: DumpHeader, positions: NDArray[np.int64]) -> list[Problem]:
    values, first, counts = np.unique(positions, return_index=True, return_counts=True)
    problems = [
        Problem(
            code="duplicate-position",
            message=f"rollout_position {int(values[at])} stands {int(counts[at])} times",
            field="rollout_position",
            row=int(first[at]),
        )
        for at in np.flatnonzero(counts > 1)[:5]
    ]
    dropped = {entry.get("rollout_position") for entry in header["dropped"]}
    both = sorted(set(positions.tolist()) & dropped)
    if both:
        problems.append(
            Problem(
                code="dropped-and-trained",
                message=f"rollout_position {both[0]} is listed as dropped and present",
            )
        )
    falls = np.flatnonzero(np.diff(positions) < 0)
    if falls.size:
        row = int(falls[0]) + 1
        problems.append(
            Problem(
                code="order",
                message=f"row {row} is not in rollout order",
                field="rollout_position",
                row=row,
            )
        )
    return problems


def placed_positions(shards: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return every rollout position that a shard's partition names."""
    known = [shard["partition"] for shard in shards if shard.get("partition") is not None]
    return {int(position) for partition in known for position in partition}


def _shard_problems(header: DumpHeader, positions: NDArray[np.int64] | None) -> list[Problem]:
    shards = header["dp_shards"]
    if positions is None or not shards or any(shard.get("partition") is None for shard in shards):
        return []
    placed, held = placed_positions(shards), set(positions.tolist())
    return [
        Problem(
            code=code,
            message=f"rollout_position {min(wrong)} {where} ({len(wrong)} such)",
        )
        for code, wrong, where in (
            ("shard-missing", placed - held, "is in a shard's partition, but not in the dump"),
            ("shard-extra", held - placed, "is in no shard's partition"),
        )
        if wrong
    ]
