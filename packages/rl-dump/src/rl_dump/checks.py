"""Decide whether a dump's samples agree with each other: lengths, positions, shards, non-finite
numbers.

`Dump.verify` runs these after the checksums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rl_dump.alignment import alignment_problems
from rl_dump.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from rl_dump.contract import DumpHeader
    from rl_dump.fields import Column

__all__ = ["structure_problems"]


def structure_problems(header: DumpHeader, columns: Mapping[str, Column]) -> list[Problem]:
    """List every disagreement between a dump's columns, and between them and its header.

    Args:
        header: the dump's header.
        columns: all its columns.
    """
    problems = [Problem(code="alignment", message=text) for text in alignment_problems(columns)]
    positions = _positions(columns)
    if positions is not None:
        problems += _position_problems(header, positions)
    return problems + _shard_problems(header, positions)


def _positions(columns: Mapping[str, Column]) -> NDArray[np.int64] | None:
    column = columns.get("rollout_position")
    return None if column is None or column.valid is not None else np.asarray(column.values)


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


def _shard_problems(header: DumpHeader, positions: NDArray[np.int64] | None) -> list[Problem]:
    partitions: list[Any] = [shard.get("partition") for shard in header["dp_shards"]]
    if positions is None or not partitions or any(partition is None for partition in partitions):
        return []
    placed = {int(position) for partition in partitions for position in partition}
    held = set(positions.tolist())
    problems = []
    if placed - held:
        text = (
            f"rollout_position {min(placed - held)} is in a shard's partition, but not in the dump"
            f" ({len(placed - held)} such)"
        )
        problems.append(Problem(code="shard-missing", message=text))
    if held - placed:
        text = (
            f"rollout_position {min(held - placed)} is in no shard's partition"
            f" ({len(held - placed)} such)"
        )
        problems.append(Problem(code="shard-extra", message=text))
    return problems
