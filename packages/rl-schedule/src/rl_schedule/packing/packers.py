"""Bin packers under a token cap, each O(n log n).

Invariants of every packer: each position is in exactly one bin; a bin's tokens never exceed `cap`
unless it is one oversized sample alone; bins come in opening order.
"""

from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from rl_schedule.arrays import IntArray, Integers, positive_column, positive_int
from rl_schedule.packing.bins import group_bins

__all__ = [
    "best_fit_decreasing",
    "decreasing_order",
    "fill_best_fit",
    "fill_first_fit",
    "first_fit",
    "first_fit_decreasing",
]


def first_fit(lengths: Integers, cap: int) -> list[list[int]]:
    """Pack in arrival order, each sample into the first opened bin with room.

    O(n log n) by a tournament tree over the room of the bins; a test holds it equal, bin for bin,
    to the definition that tries every open bin.

    Args:
        lengths: tokens [n], each >= 1.
        cap: tokens per bin; a longer sample gets a bin of its own.

    Returns:
        Positions of each bin, in opening order; `[]` for no samples. Example: lengths 5, 4, 3 under
        cap 8 give `[[0, 2], [1]]`.

    Raises:
        ScheduleError: a length or a cap below 1.
    """
    return _pack(fill_first_fit, lengths, cap, longest_first=False)


def first_fit_decreasing(lengths: Integers, cap: int) -> list[list[int]]:
    """Pack longest first, each sample into the first opened bin with room; ties in arrival order.

    At most 11/9 of the fewest bins plus 6/9 (Dosa 2007). Arguments, returns and errors as
    `first_fit`.
    """
    return _pack(fill_first_fit, lengths, cap, longest_first=True)


def best_fit_decreasing(lengths: Integers, cap: int) -> list[list[int]]:
    """Pack longest first, each sample into the opened bin with the least room that holds it.

    Ties in arrival order; of bins with equal room the most recently reached one. Arguments, returns
    and errors as `first_fit`.
    """
    return _pack(fill_best_fit, lengths, cap, longest_first=True)


def _pack(
    fill: Callable[[list[int], int], list[int]], lengths: Integers, cap: int, *, longest_first: bool
) -> list[list[int]]:
    """Check what a caller gave, pack, and list the positions of each bin in packing order."""
    column, limit = positive_column(lengths, "lengths"), positive_int(cap, "cap")
    order = decreasing_order(column) if longest_first else np.arange(column.size)
    bin_of = np.asarray(fill(column[order].tolist(), limit), dtype=np.int64)
    return [order[members].tolist() for members in group_bins(bin_of)]


def decreasing_order(lengths: IntArray) -> IntArray:
    """Return positions longest first, ties in arrival order, int64 [n]."""
    return np.argsort(-lengths, kind="stable").astype(np.int64)


def fill_first_fit(lengths: list[int], cap: int) -> list[int]:
    """First fit over `lengths` as they come: the bin of each sample, numbered in opening order.

    The tree's leaves are bins and each node holds the largest room below it. A bin that is not open
    yet has the full cap, so opening needs no extra step: the leftmost leaf with room is either an
    open bin or the next new one.
    """
    # Node 1 is the root, node i has children 2 i and 2 i + 1, the leaf of bin b is node size + b.
    size = 1 << max(1, len(lengths) - 1).bit_length()
    room = [cap] * (2 * size)
    chosen = [0] * len(lengths)
    for sample, length in enumerate(lengths):
        # An oversized sample asks for an empty bin, and leaves it with negative room.
        need = min(length, cap)
        node = 1
        while node < size:
            node += node
            if room[node] < need:
                node += 1
        chosen[sample] = node - size
        left = room[node] - length
        room[node] = left
        node >>= 1
        while node:
            best = room[node + node]
            other = room[node + node + 1]
            if other > best:  # noqa: PLR1730 - a call of max() doubles the time of this loop
                best = other
            if room[node] == best:  # Nothing above changes either.
                break
            room[node] = best
            node >>= 1
    return chosen


def fill_best_fit(lengths: list[int], cap: int) -> list[int]:
    """Best fit over `lengths` as they come: the bin of each sample, numbered in opening order.

    Keeps the distinct rooms sorted and a stack of bins per room, so a sample costs one binary
    search.
    """
    rooms: list[int] = []
    stacks: dict[int, list[int]] = {}
    chosen = [0] * len(lengths)
    opened = 0
    for sample, length in enumerate(lengths):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            target, left = opened, cap - length
            opened += 1
        else:
            room = rooms[at]
            stack = stacks[room]
            target, left = stack.pop(), room - length
            if not stack:
                del stacks[room], rooms[at]
        chosen[sample] = target
        if left > 0:
            if left not in stacks:
                insort(rooms, left)
            stacks.setdefault(left, []).append(target)
    return chosen
