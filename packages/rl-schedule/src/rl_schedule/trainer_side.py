"""What a trainer does around a plan: outputs back in order, and a micro-batch without samples.

Invariants: `restore_order` undoes the order in which samples ran; a filler trains nothing.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import IntArray, integer_column, positive_int, read_only
from rl_schedule.errors import ScheduleError

__all__ = ["Filler", "build_filler", "restore_order"]

_LONGEST_FILLER = 2**24
"""Tokens of the longest filler: millions of ranks that cut one sequence are a mistake."""


def restore_order(values: Any, positions: Sequence[int] | IntArray) -> Any:
    """Return what samples gave, in order of their rollout positions.

    Example: `restore_order(["c", "a"], [2, 0])` is `["a", "c"]`.

    Args:
        values: one entry per sample that ran, in running order: a list or another sequence, or an
            array, tensor or pandas column whose first axis is the samples. Entries are taken by
            their place, whatever index a column carries.
        positions: int64 [n], their rollout positions: `RankView.partition` for one rank,
            `SchedulePlan.sample_positions` for all ranks one after the other. Each >= 0, once.

    Returns:
        The same kind as `values`, ascending by rollout position; a tuple for any tuple, a list for
        any other sequence. Dropped samples have no entry.

    Raises:
        ScheduleError: not one entry per position, values without an order or that cannot be taken
            by place, text, or positions that are negative or occur twice.
    """
    order = _order_of(positions)
    if isinstance(values, (str, bytes, bytearray, Mapping, AbstractSet)):
        raise ScheduleError(
            f"values is a {type(values).__name__}, which is no column of one entry per sample; pass"
            " a list, an array or a tensor, in the order of the micro-batches"
        )
    count = _entries(values)
    if count != order.size:
        raise ScheduleError(
            f"values has {'no' if count is None else count} entries for {order.size} positions;"
            " pass one per sample, in the order of the micro-batches"
        )
    if isinstance(values, Sequence):
        kind = tuple if isinstance(values, tuple) else list
        entries = list(values)
        return kind(entries[place] for place in order.tolist())
    try:
        # A pandas column is indexed by label; iloc goes by place.
        return (values.iloc if hasattr(values, "iloc") else values)[order]
    except Exception as error:
        raise ScheduleError(
            f"values of type {type(values).__name__} cannot be taken by place ({error!r:.200});"
            " pass a list, an array or a tensor"
        ) from error


def _order_of(positions: object) -> IntArray:
    """Return the places of `positions` in ascending order; refuse what are no positions."""
    column = integer_column(positions, "positions")
    order = np.argsort(column, kind="stable")
    ascending = column[order]
    twice = np.diff(ascending, prepend=-1) == 0
    wrong = ascending[(ascending < 0) | twice]
    if wrong.size:
        first = int(wrong[0])
        how = "is negative" if first < 0 else "occurs twice"
        raise ScheduleError(
            f"positions: {first} {how}; pass the rollout position of each sample that ran, such as"
            " RankView.partition"
        )
    return order


def _entries(values: Any) -> int | None:
    """Return how many entries a column has, None for what has no length."""
    try:
        return len(values)
    except TypeError:
        return None


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
        ScheduleError: a size below 1, sizes that ask for more than 2**24 tokens, or a token id that
            is no integer.
    """
    count = 2 * positive_int(cp_size, "cp_size") * positive_int(tp_size, "tp_size")
    if count > _LONGEST_FILLER:
        raise ScheduleError(
            f"a filler for cp_size={cp_size} and tp_size={tp_size} has {count} tokens, more than"
            f" {_LONGEST_FILLER}; pass the sizes of the two parallel groups"
        )
    token = int(integer_column([token_id], "token_id")[0])
    mask = np.zeros(count, dtype=np.int32)
    mask.flags.writeable = False
    return Filler(
        tokens=read_only(np.full(count, token, dtype=np.int64)),
        position_ids=read_only(np.arange(count, dtype=np.int64)),
        loss_mask=mask,
    )
