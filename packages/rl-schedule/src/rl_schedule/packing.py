"""Bin packers under a token cap, each O(n log n); algorithm layer, above `arrays`.

Decides which samples share a micro-batch when only the cap matters. Invariants of every packer:
each position is in exactly one bin; a bin's tokens never exceed `cap` unless it is one oversized
sample alone; bins come in opening order.
"""

from bisect import bisect_left, insort

import numpy as np

from rl_schedule.arrays import IntArray, Integers, positive_column, positive_int

__all__ = [
    "best_fit_decreasing",
    "decreasing_order",
    "fill_best_fit",
    "fill_first_fit",
    "first_fit",
    "first_fit_decreasing",
    "first_fit_reference",
    "group_bins",
]


def first_fit_reference(lengths: Integers, cap: int) -> list[list[int]]:
    """Pack in arrival order into the first bin with room: the naive definition, O(n * bins), against which all is tested."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for position, length in enumerate(positive_column(lengths, "lengths").tolist()):
        for index, room in enumerate(rooms):
            if length <= room:
                bins[index].append(position)
                rooms[index] -= length
                break
        else:
            bins.append([position])
            rooms.append(cap - length)
    return bins


def first_fit(lengths: Integers, cap: int) -> list[list[int]]:
    """Pack in arrival order, each sample into the first opened bin with room.

    Equal to `first_fit_reference` bin for bin, in O(n log n) by a tournament tree over the room of
    the bins.

    Args:
        lengths: tokens [n], each >= 1.
        cap: tokens per bin; a longer sample gets a bin of its own.

    Returns:
        Positions of each bin, in opening order; `[]` for no samples. Example: lengths 5, 4, 3 under
        cap 8 give `[[0, 2], [1]]`.

    Raises:
        ScheduleError: a length or a cap below 1.
    """
    column, limit = positive_column(lengths, "lengths"), positive_int(cap, "cap")
    return group_bins(np.asarray(fill_first_fit(column.tolist(), limit), dtype=np.int64))


def first_fit_decreasing(lengths: Integers, cap: int) -> list[list[int]]:
    """Pack longest first, each sample into the first opened bin with room; ties in arrival order.

    At most 11/9 of the fewest bins plus 6/9 (Dosa 2007). Arguments, returns and errors as
    `first_fit`.
    """
    column, limit = positive_column(lengths, "lengths"), positive_int(cap, "cap")
    order = decreasing_order(column)
    return _regroup(fill_first_fit(column[order].tolist(), limit), order)


def best_fit_decreasing(lengths: Integers, cap: int) -> list[list[int]]:
    """Pack longest first, each sample into the opened bin with the least room that holds it; ties
    in arrival order.

    Between bins of equal room the most recently reached one is taken. Arguments, returns and errors
    as `first_fit`.
    """
    column, limit = positive_column(lengths, "lengths"), positive_int(cap, "cap")
    order = decreasing_order(column)
    return _regroup(fill_best_fit(column[order].tolist(), limit), order)


def decreasing_order(lengths: IntArray) -> IntArray:
    """Return positions longest first, ties in arrival order, int64 [n]."""
    return np.argsort(-lengths, kind="stable").astype(np.int64)


def fill_first_fit(lengths: list[int], cap: int) -> list[int]:
    """First fit over `lengths` as they come: the bin of each sample, numbered in opening order.

    The tree's leaves are bins and each node holds the largest room below it. A bin that is not open
    yet has the full cap, so opening needs no extra step: the leftmost leaf with room is either an
    open bin or the next new one.
    """
    size = 1 << max(1, len(lengths) - 1).bit_length()
    room = [cap] * (2 * size)
    chosen = [0] * len(lengths)
    for sample, length in enumerate(lengths):
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
            if room[node] == best:
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
            waiting = stacks.get(left)
            if waiting is None:
                stacks[left] = [target]
                insort(rooms, left)
            else:
                waiting.append(target)
    return chosen


def group_bins(bin_of: IntArray, num_bins: int | None = None) -> list[list[int]]:
    """List the positions of each bin, ascending, from the bin of each position."""
    count = num_bins if num_bins is not None else (int(bin_of.max()) + 1 if bin_of.size else 0)
    order = np.argsort(bin_of, kind="stable").tolist()
    ends = np.cumsum(np.bincount(bin_of, minlength=count)).tolist() if count else []
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _regroup(chosen: list[int], order: IntArray) -> list[list[int]]:
    """Turn bins of the sorted samples into lists of positions, longest sample first inside a bin."""
    return [
        [int(position) for position in order[members]]
        for members in group_bins(np.asarray(chosen, dtype=np.int64))
    ]
