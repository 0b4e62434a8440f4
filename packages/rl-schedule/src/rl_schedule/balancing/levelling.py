"""Cap-safe swaps that bring bin costs together; algorithm layer.

Decides which samples two bins exchange so that the costlier one gets cheaper. Invariants: no bin
exceeds the cap that did not before; the costlier bin of a pair never gets costlier than it was;
bounded by counts, never by time.
"""

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.dealing import bin_sums

__all__ = ["level_bins"]

_ROUNDS = 8
"""Rounds of pairing; each roughly halves the spread that swaps can remove at all."""

_CANDIDATES = 8
"""Longest samples of a bin that may be exchanged; bins of tight fits hold fewer."""


def level_bins(
    bin_of: IntArray, lengths: IntArray, costs: IntArray, *, cap: int, num_bins: int, level: int
) -> IntArray:
    """Pair the i-th costliest with the i-th cheapest bin and exchange the two samples that level
    each pair best.

    Every other round pairs only the bins above `level` with one another: what lies below is topped
    up later anyway.

    Args:
        bin_of: int64 [n], bin of each sample.
        lengths: int64 [n], longest first.
        costs: int64 [n].
        cap: tokens per bin.
        num_bins: number of bins.
        level: cost above which bins count as costly.

    Returns:
        The bins after at most `_ROUNDS` rounds, int64 [n].
    """
    levelled = bin_of.copy()
    tokens, sums = bin_sums(lengths, levelled, num_bins), bin_sums(costs, levelled, num_bins)
    for number in range(_ROUNDS):
        by_cost = np.argsort(-sums, kind="stable")
        among = by_cost if number % 2 == 0 else by_cost[: int(np.count_nonzero(sums > level))]
        half = among.size // 2
        if not half:
            continue
        heavy, light = among[:half], among[::-1][:half]
        table = _members(levelled, num_bins)
        rooms = cap - tokens
        given, taken, gain = _best_swaps(
            table[heavy],
            table[light],
            lengths,
            costs,
            rooms[heavy],
            rooms[light],
            sums[heavy] - sums[light],
        )
        chosen = np.flatnonzero(gain > 0)
        a, b, s, t = heavy[chosen], light[chosen], given[chosen], taken[chosen]
        levelled[s], levelled[t] = b, a
        moved, cost = lengths[s] - lengths[t], costs[s] - costs[t]
        tokens[a] -= moved
        tokens[b] += moved
        sums[a] -= cost
        sums[b] += cost
    return levelled


def _members(bin_of: IntArray, num_bins: int) -> IntArray:
    """Return the first `_CANDIDATES` samples of each bin, int64 [num_bins, width], -1 where there are fewer."""
    order = np.argsort(bin_of, kind="stable")
    counts = np.bincount(bin_of, minlength=num_bins)
    width = max(1, min(_CANDIDATES, int(counts.max())))
    starts = np.cumsum(counts) - counts
    place = np.arange(width)
    table = np.full((num_bins, width), -1, dtype=np.int64)
    inside = place < counts[:, None]
    table[inside] = order[(starts[:, None] + place)[inside]]
    return table


def _best_swaps(
    heavy: IntArray,
    light: IntArray,
    lengths: IntArray,
    costs: IntArray,
    heavy_room: IntArray,
    light_room: IntArray,
    gap: IntArray,
) -> tuple[IntArray, IntArray, IntArray]:
    """Return for each pair of bins the sample to give, the one to take, and by how much the gap shrinks (0 = no swap)."""
    s, t = heavy[:, :, None], light[:, None, :]
    longer = lengths[s] - lengths[t]
    dearer = costs[s] - costs[t]
    allowed = (
        (s >= 0)
        & (t >= 0)
        & (longer <= light_room[:, None, None])
        & (-longer <= heavy_room[:, None, None])
    )
    shrink = np.where(
        allowed & (dearer > 0), gap[:, None, None] - np.abs(gap[:, None, None] - 2 * dearer), 0
    )
    flat = shrink.reshape(shrink.shape[0], -1)
    best = flat.argmax(axis=1)
    rows = np.arange(best.size)
    width = light.shape[1]
    return heavy[rows, best // width], light[rows, best % width], flat[rows, best]
