"""Number partitioning by largest differencing: `k` sets of nearly equal sum when no cap matters.

Many partial partitions into k sets are merged two at a time, always the two whose sets differ most,
the heaviest set of one with the lightest of the other, so that their differences cancel. Source:
Karmarkar and Karp, "The differencing method of set partitioning", UCB/CSD 82/113, 1982.

Invariants: every position is in exactly one set; with `equal_size` every set has `n / k` positions.
"""

import heapq
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import IntArray, cost_column, positive_int
from rl_schedule.cost import integer_costs
from rl_schedule.errors import ScheduleError

__all__ = ["deal_by_differencing", "karmarkar_karp"]

_Partition: TypeAlias = list[tuple[int, list[int]]]
"""Weight and positions of each of k sets, heaviest set first."""


def karmarkar_karp(weights: npt.ArrayLike, k: int, equal_size: bool = False) -> list[list[int]]:
    """Split positions into `k` sets of nearly equal weight.

    Starts from one partial partition per item (or per `k` neighbours in sorted order with
    `equal_size`), and keeps merging the two whose spread is largest, heaviest set onto lightest.

    Args:
        weights: [n] finite numbers >= 0.
        k: number of sets.
        equal_size: give every set exactly `n / k` positions.

    Returns:
        `k` lists of positions, heaviest set first; some may be empty without `equal_size`.
        Example: weights 8, 7, 6, 5, 4 with k=2 give sums 16 and 14.

    Raises:
        ScheduleError: a bad weight, or `equal_size` with a count that is no multiple of `k`.
    """
    sets = positive_int(k, "k")
    given = cost_column(weights, "weights")
    if given.size == 0:
        return [[] for _ in range(sets)]
    costs = integer_costs(given, terms=given.size)
    if equal_size and costs.size % sets:
        raise ScheduleError(f"equal_size needs a multiple of k={sets} weights, got {costs.size}")
    if equal_size:
        return [sorted(hand) for hand in deal_by_differencing(costs, sets).tolist()]
    singles: list[_Partition] = [
        [(weight, [position]), *((0, list[int]()) for _ in range(sets - 1))]
        for position, weight in enumerate(costs.tolist())
    ]
    return [sorted(members) for members in _merge_widest_first(singles)]


def deal_by_differencing(weights: IntArray, k: int) -> IntArray:
    """Deal weights into `k` hands of equal size, heaviest hand first.

    Args:
        weights: int64 [n], n a positive multiple of `k`.
        k: number of hands.

    Returns:
        Positions of each hand, int64 [k, n / k].
    """
    order = np.argsort(-weights, kind="stable")
    # Each partial partition has one item per hand, so that hands stay of equal size in every merge.
    groups: list[_Partition] = [
        [(weight, [position]) for weight, position in zip(ws, positions, strict=True)]
        for ws, positions in zip(
            weights[order].reshape(-1, k).tolist(), order.reshape(-1, k).tolist(), strict=True
        )
    ]
    return np.array(_merge_widest_first(groups), dtype=np.int64)


def _merge_widest_first(partitions: list[_Partition]) -> list[list[int]]:
    """Merge the two partitions of widest spread until one is left; its sets, heaviest first."""
    # The number keeps ties in order of creation and sets out of the comparison.
    heap = [(part[-1][0] - part[0][0], number, part) for number, part in enumerate(partitions)]
    heapq.heapify(heap)
    for number in range(len(partitions), 2 * len(partitions) - 1):
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [members for _, members in heap[0][2]]
