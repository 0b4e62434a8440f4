"""What a trainer does around a plan: outputs back in order, and a micro-batch without samples.

Invariants: `restore_order` undoes the order in which samples ran; a filler trains nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import IntArray, integer_column, positive_int, read_only
from rl_schedule.errors import ScheduleError

__all__ = ["Filler", "build_filler", "restore_order"]


def restore_order(values: Any, positions: Sequence[int] | IntArray) -> Any:
    """Return what samples gave, in order of their rollout positions.

    Example: `restore_order(["c", "a"], [2, 0])` is `["a", "c"]`.

    Args:
        values: one entry per sample that ran, in running order: a list, or an array or tensor whose
            first axis is the samples.
        positions: int64 [n], their rollout positions: `RankView.partition` for one rank,
            `SchedulePlan.sample_positions` for all ranks one after the other.

    Returns:
        The same kind as `values`, ascending by rollout position. Dropped samples have no entry.

    Raises:
        ScheduleError: not one entry per position.
    """
    order = np.argsort(integer_column(positions, "positions"), kind="stable")
    if not hasattr(values, "__len__") or len(values) != order.size:
        count = len(values) if hasattr(values, "__len__") else "no"
        raise ScheduleError(
            f"values has {count} entries for {order.size} positions; pass one per sample, in the"
            " order of the micro-batches"
        )
    if isinstance(values, (list, tuple)):
        return type(values)([values[place] for place in order.tolist()])
    return values[order]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filler:
    """A micro-batch without samples, run with zero loss so that ranks stay in step."""

    tokens: IntArray
    """int64 [n]: one sequence of the given token."""
    position_ids: IntArray
    """int64 [n]: 0 to n - 1."""
    loss_mask: npt.NDArray[np.int32]
    """int32 [n]: all 0; nothing of it is trained or counted."""


def build_filler(*, token_id: int = 0, cp_size: int = 1, tp_size: int = 1) -> Filler:
    """Return the shortest sequence that every rank can cut, `2 * cp_size * tp_size` tokens.

    Zig-zag context parallelism cuts it into `2 * cp_size` chunks, sequence parallelism each of them
    into `tp_size`. Multiply its loss by 0, so that it still takes part in every collective.

    Args:
        token_id: token it is made of; padding by custom, any other will do.
        cp_size: context-parallel ranks.
        tp_size: tensor-parallel ranks.

    Raises:
        ScheduleError: a size below 1, or a token id that is no integer.
    """
    count = 2 * positive_int(cp_size, "cp_size") * positive_int(tp_size, "tp_size")
    token = int(integer_column([token_id], "token_id")[0])
    mask = np.zeros(count, dtype=np.int32)
    mask.flags.writeable = False
    return Filler(
        tokens=read_only(np.full(count, token, dtype=np.int64)),
        position_ids=read_only(np.arange(count, dtype=np.int64)),
        loss_mask=mask,
    )
