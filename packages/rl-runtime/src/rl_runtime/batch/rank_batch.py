"""The columns of one rollout batch and the part of them that one data-parallel rank trains on.

`rollout-batch.v1`: keyed columns, one entry per sample, in rollout order; names and dtypes are
those of the field table in the documentation.

Invariants: every column has one entry per sample; a rank's part holds its samples in the order of
its partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_dump import RaggedArray
from rl_schedule import RankView

__all__ = ["Column", "RankBatch", "take_columns"]

Column = npt.NDArray[np.generic] | RaggedArray
"""One value per sample (a 1-D array) or one array per sample (ragged)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """What one data-parallel rank trains on in one batch."""

    batch_id: int
    """Loop counter."""
    plan: RankView
    """The rank's part of the plan, with the digest of the whole plan."""
    columns: Mapping[str, Column]
    """The rank's samples, in the order of `plan.partition`."""
    step_units: npt.NDArray[np.float64]
    """float64 [steps]: units that each step's loss is averaged over (rollouts, samples, prompt
    groups or tokens, by the aggregation).
    """


def take_columns(
    columns: Mapping[str, Column], positions: npt.NDArray[np.int64]
) -> dict[str, Column]:
    """Pick samples by position from every column.

    Args:
        columns: columns over all samples.
        positions: int64 [n], sample positions.

    Returns:
        The same columns with n samples.
    """
    return {name: column.take(positions) for name, column in columns.items()}
