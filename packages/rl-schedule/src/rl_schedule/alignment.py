"""How K micro-batches become a multiple of what the ranks need; algorithm layer, above `packing`.

Decides which micro-batches split and how many fillers remain. Invariants: a split never makes a
micro-batch larger (so the cap survives); fillers appear only when every micro-batch holds a single
sample, or under static packing.
"""

import heapq

from rl_schedule.errors import InfeasibleScheduleError

__all__ = ["refuse_fillers", "round_up", "split_bins"]


def round_up(count: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is >= `count` and >= `multiple`.

    Example: 5 and 0 rounded up to multiples of 4 give 8 and 4.
    """
    return max(multiple, -(-count // multiple) * multiple)


def split_bins(bins: list[list[int]], lengths: list[int], target: int) -> list[list[int]]:
    """Split the fullest bins in two until there are `target` of them or only single samples remain.

    The bin with most tokens among those with at least two samples (the first of equals) deals its
    samples, longest first, to the lighter of two halves; the first half keeps its place and the
    second one is appended. O((n + t) log n).

    Args:
        bins: positions of each bin.
        lengths: tokens of each position.
        target: bins wanted; fewer result when there are fewer samples, never more.

    Returns:
        The bins, positions ascending inside those that were split. The argument is not changed.
    """
    result = [list(members) for members in bins]
    heap = [
        (-sum(lengths[i] for i in members), number)
        for number, members in enumerate(result)
        if len(members) > 1
    ]
    heapq.heapify(heap)
    while len(result) < target and heap:
        _, number = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = ([], [])
        tokens = [0, 0]
        for position in sorted(result[number], key=lambda i: (-lengths[i], i)):
            lighter = 0 if tokens[0] <= tokens[1] else 1
            halves[lighter].append(position)
            tokens[lighter] += lengths[position]
        for half, place, weight in zip(halves, (number, len(result)), tokens, strict=True):
            if place == len(result):
                result.append(sorted(half))
            else:
                result[place] = sorted(half)
            if len(half) > 1:
                heapq.heappush(heap, (-weight, place))
    return result


def refuse_fillers(
    policy: str, *, step: int, num_samples: int, packed: int, needed: int, alignment: int
) -> None:
    """Raise if `policy` forbids the fillers that `needed - packed` missing micro-batches would be.

    Raises:
        InfeasibleScheduleError: `policy` is `"error"` and `packed < needed`.
    """
    if policy == "error" and packed < needed:
        raise InfeasibleScheduleError(
            f"step {step} has {num_samples} samples in {packed} micro-batches but needs {needed} (a"
            f' multiple of {alignment} = ranks times pipeline group) and on_misaligned is "error";'
            ' use fewer ranks, more samples, or on_misaligned="split_then_filler"'
        )
