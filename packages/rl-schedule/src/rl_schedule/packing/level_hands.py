"""Levelling hands that keep their number of items: swaps with the costliest hand.

Dealing by differencing gives each hand one item of every group of neighbours, so what one very
costly item is too much stays; swaps take it back, wherever the items are.

Invariants: every hand keeps its number of items of each size; the costliest hand never gets
costlier; the number of swaps is bounded by counts.
"""

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.packing.bins import bin_sums

__all__ = ["level_hands"]

_MOST_SWAPS = 32
"""Swaps per hand at most."""

_MOST_PARTNERS = 8
"""Cheapest hands that are tried as partners of the costliest one before it stays as it is."""

_LEVEL = 1.0005
"""Hands this close to the mean need no more swaps."""


def level_hands(costs: IntArray, hand_of: IntArray, num_hands: int, sizes: IntArray) -> IntArray:
    """Swap items of equal size between the costliest hand and the cheapest ones: int64 [n].

    A swap of items whose costs differ by d takes d from a hand that is `gap` above its partner;
    that lowers both below where the dearer one was while 0 < d < gap, most at d = gap / 2.

    Args:
        costs: int64 [n].
        hand_of: int64 [n], hand of each item.
        num_hands: hands.
        sizes: int64 [n], what is the same for items that may be swapped.

    Returns:
        The hand of each item.
    """
    hands = hand_of.copy()
    load = bin_sums(costs, hands, num_hands)
    for _ in range(_MOST_SWAPS * num_hands):
        heavy = int(load.argmax())
        if int(load[heavy]) * num_hands <= _LEVEL * int(load.sum()):
            break
        for light in np.argsort(load, kind="stable")[:_MOST_PARTNERS].tolist():
            found = _best_swap(costs, sizes, hands, heavy, light, int(load[heavy] - load[light]))
            if found is not None:
                break
        else:
            break
        down, up = found
        hands[down], hands[up] = light, heavy
        moved = costs[down] - costs[up]
        load[heavy] -= moved
        load[light] += moved
    return hands


def _best_swap(
    costs: IntArray, sizes: IntArray, hands: IntArray, heavy: int, light: int, gap: int
) -> tuple[int, int] | None:
    """Return the items of `heavy` and `light` whose costs differ by nearly `gap / 2`, or None."""
    best, closest = None, gap
    given, taken = np.flatnonzero(hands == heavy), np.flatnonzero(hands == light)
    for size in np.unique(sizes[given]).tolist():
        down, up = given[sizes[given] == size], taken[sizes[taken] == size]
        if not up.size:
            continue
        up = up[np.argsort(costs[up], kind="stable")]
        # The first item of the other hand that is dearer than wanted, and the one before it.
        at = np.searchsorted(costs[up], costs[down] - gap // 2)
        for place in (np.maximum(at - 1, 0), np.minimum(at, up.size - 1)):
            apart = np.abs(2 * (costs[down] - costs[up[place]]) - gap)
            nearest = int(apart.argmin())
            # Less than `gap` apart from `gap` means a difference between 0 and `gap`.
            if int(apart[nearest]) < closest:
                closest = int(apart[nearest])
                best = int(down[nearest]), int(up[place[nearest]])
    return best
