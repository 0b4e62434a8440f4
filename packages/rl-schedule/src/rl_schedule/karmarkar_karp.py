"""Number partitioning by largest differencing; algorithm layer, above `arrays`.

Decides how weights split into `k` sets of nearly equal sum when no cap matters. Invariants: every
position is in exactly one set; with `equal_size` every set has `n / k` positions. Source: Karmarkar
and Karp, "The differencing method of set partitioning", UCB/CSD 82/113, 1982.
"""

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import IntArray, positive_int
from rl_schedule.cost import integer_costs
from rl_schedule.errors import ScheduleError

__all__ = ["deal_by_differencing", "karmarkar_karp"]


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
    given: npt.NDArray[Any] = np.asarray(weights)
    if given.size == 0:
        return [[] for _ in range(sets)]
    if (
        given.ndim != 1
        or given.dtype.kind not in "iuf"
        or not bool(np.all(np.isfinite(given) & (given >= 0)))
    ):
        raise ScheduleError(
            f"weights must be a list of finite numbers >= 0, got dtype {given.dtype}, shape"
            f" {given.shape}"
        )
    costs = integer_costs(given, terms=given.size)
    if not equal_size:
        return _differencing(costs.tolist(), sets)
    if costs.size % sets:
        raise ScheduleError(f"equal_size needs a multiple of k={sets} weights, got {costs.size}")
    parts: list[list[int]] = deal_by_differencing(costs, sets).tolist()
    return [sorted(part) for part in parts]


def deal_by_differencing(weights: IntArray, k: int) -> IntArray:
    """Deal `n` weights, `n` a multiple of `k`, into `k` hands of equal size; int64 [k, n / k], heaviest first."""
    order = np.argsort(-weights, kind="stable")
    groups = order.reshape(-1, k)
    heap: list[tuple[int, int]] = []
    sums: dict[int, IntArray] = {}
    hands: dict[int, IntArray] = {}
    for number, group in enumerate(groups):
        sums[number] = weights[group]
        hands[number] = group.reshape(k, 1).astype(np.int64)
        heap.append((-int(sums[number][0] - sums[number][-1]), number))
    heapq.heapify(heap)
    number = len(groups)
    while len(heap) > 1:
        _, first = heapq.heappop(heap)
        _, second = heapq.heappop(heap)
        merged = sums.pop(first) + sums.pop(second)[::-1]
        members = np.concatenate([hands.pop(first), hands.pop(second)[::-1]], axis=1)
        heaviest_first = np.argsort(-merged, kind="stable")
        sums[number], hands[number] = merged[heaviest_first], members[heaviest_first]
        heapq.heappush(heap, (-int(sums[number][0] - sums[number][-1]), number))
        number += 1
    return next(iter(hands.values()))


def _differencing(weights: list[int], k: int) -> list[list[int]]:
    """Largest differencing without size limits; partial partitions are kept heaviest set first."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for position, weight in enumerate(weights):
        empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(k - 1)]
        heap.append((-weight if k > 1 else 0, position, [(weight, [position]), *empty]))
    heapq.heapify(heap)
    number = len(weights)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [sorted(members) for _, members in heap[0][2]]
