"""The columns of one batch, and the share of them that one data-parallel rank trains on.

Columns are keyed by name and have one entry per sample. `COLUMN_TYPES` has their dtypes,
docs/contracts.md their meaning.

Invariants: a `RankBatch` holds its samples in the order of its partition, so that the plan's local
indices find them; one that came from another process is checked once, by `check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_dump import RaggedArray
from rl_runtime.errors import BatchMismatchError
from rl_schedule import RankView

__all__ = ["Column", "RankBatch", "take_columns"]

Column = npt.NDArray[np.generic] | RaggedArray
"""One value per sample (a 1-D array) or one array per sample (ragged)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One data-parallel rank's share of a batch.

    Example: batch 3 has three samples; rank 0 trains on samples 2 and 0, one micro-batch each, and
    rank 1 on sample 1. Rank 0 gets `plan.partition` [2, 0], `plan.micro_batch_indices` [[0], [1]],
    columns such as `rollout_position` [2, 0], and `step_units` [3.0], which counts all ranks.
    """

    batch_id: int
    """Loop counter."""
    plan: RankView
    """The rank's view of the plan, with the digest of the whole plan."""
    columns: Mapping[str, Column]
    """The rank's samples, in the order of `plan.partition`."""
    step_units: npt.NDArray[np.float64]
    """float64 [S]: units that each step's loss is averaged over, over all ranks.

    Rollouts, samples, prompt groups or tokens, by the aggregation.
    """
    whole_batch: Mapping[str, Any] | None = None
    """What the train dump says of the whole batch; on rank 0, whose trainer writes it, else None.

    `schedule` (the document `schedule-plan.v1`), `raw_reward` (float, in rollout order) and
    `dropped` (samples that the plan leaves out, with the reason), as rl-dump takes them.
    """

    def check(self) -> None:
        """Compare the columns with the plan, where a process receives them.

        Raises:
            BatchMismatchError: a column has another number of samples than the plan gives this
                rank; lists all.
        """
        planned = len(self.plan.partition)
        wrong = {
            name: len(column) for name, column in self.columns.items() if len(column) != planned
        }
        if wrong:
            raise BatchMismatchError(
                f"batch {self.batch_id}: the plan gives rank {self.plan.rank} {planned} samples,"
                f" but these columns came with another number: {wrong}"
            )


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
