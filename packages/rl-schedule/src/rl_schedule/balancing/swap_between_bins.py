"""Swaps of two samples that bring the costs of two bins together, under the token cap.

Bins are paired, the costliest with the cheapest, and all pairs find their best swap at once: numpy
compares every sample of one bin with every sample of its partner.

Invariants: no bin exceeds the cap that did not before; the costlier bin of a pair never gets
costlier than it was; bounded by counts, never by time.

Axis letters: N samples, K bins, P pairs of bins, W samples of a bin that may be swapped (the table
is as wide as the fullest bin, at most `_CANDIDATES`, and has -1 where a bin holds fewer).
"""

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.packing import bin_sums

__all__ = ["gap_closed", "level_bins"]

_ROUNDS = 8
"""Rounds of pairing; each roughly halves the spread that swaps can remove at all."""

_CANDIDATES = 8
"""Longest samples of a bin that may be exchanged; bins of tight fits hold fewer."""


def gap_closed(gap: IntArray | int, moved: IntArray) -> IntArray:
    """Return by how much the distance of two costs shrinks when `moved` goes from high to low.

    Negative where it grows. Example, gap 10: moving 5 closes 10, 2 or 8 closes 4, 12 opens 4.
    """
    # What leaves one side arrives at the other, so the gap changes by twice as much; past the
    # middle it opens the other way round.
    return gap - np.abs(gap - 2 * moved)


def level_bins(
    bin_of: IntArray, lengths: IntArray, costs: IntArray, *, cap: int, num_bins: int, level: int
) -> IntArray:
    """Pair costly with cheap bins and swap the two samples that level each pair best.

    The i-th costliest meets the i-th cheapest. Every other round pairs only the bins above `level`
    with one another: what lies below is topped up later anyway.

    Args:
        bin_of: int64 [N], bin of each sample.
        lengths: int64 [N], longest first.
        costs: int64 [N].
        cap: tokens per bin.
        num_bins: number of bins.
        level: cost above which bins count as costly.

    Returns:
        The bins after at most `_ROUNDS` rounds, int64 [N].
    """
    levelled = bin_of.copy()
    room_K, cost_K = cap - bin_sums(lengths, bin_of, num_bins), bin_sums(costs, bin_of, num_bins)
    for number in range(_ROUNDS):
        bins = np.argsort(-cost_K, kind="stable")
        if number % 2:
            bins = bins[: int(np.count_nonzero(cost_K > level))]
        half = bins.size // 2
        if not half:
            continue
        heavy_P, light_P = bins[:half], bins[::-1][:half]
        table_KW = _longest_of_each_bin(levelled, num_bins)
        give_P, take_P, gain_P = _best_swaps(
            table_KW[heavy_P],
            table_KW[light_P],
            lengths,
            costs,
            room_K[heavy_P],
            room_K[light_P],
            cost_K[heavy_P] - cost_K[light_P],
        )
        # A bin is in one pair only, so plain fancy indexing updates each entry at most once.
        useful = gain_P > 0
        heavy, light, give, take = (x[useful] for x in (heavy_P, light_P, give_P, take_P))
        levelled[give], levelled[take] = light, heavy
        for total_K, moved in (
            (room_K, lengths[take] - lengths[give]),
            (cost_K, costs[give] - costs[take]),
        ):
            total_K[heavy] -= moved
            total_K[light] += moved
    return levelled


def _longest_of_each_bin(bin_of: IntArray, num_bins: int) -> IntArray:
    """Return the first samples of each bin, int64 [K, W], -1 where there are fewer."""
    # Samples come longest first and the sort is stable: each bin's run in `order` is longest first.
    order = np.argsort(bin_of, kind="stable")
    count_K = np.bincount(bin_of, minlength=num_bins)
    start_K = np.cumsum(count_K) - count_K
    place_W = np.arange(max(1, min(_CANDIDATES, int(count_K.max()))))
    table_KW = np.full((num_bins, place_W.size), -1, dtype=np.int64)
    inside_KW = place_W < count_K[:, None]
    table_KW[inside_KW] = order[(start_K[:, None] + place_W)[inside_KW]]
    return table_KW


def _best_swaps(
    heavy_PW: IntArray,
    light_PW: IntArray,
    lengths: IntArray,
    costs: IntArray,
    heavy_room_P: IntArray,
    light_room_P: IntArray,
    gap_P: IntArray,
) -> tuple[IntArray, IntArray, IntArray]:
    """Return per pair the sample to give, the one to take, and the gap closed (0 = no swap)."""
    # [P, W, W]: sample of the heavy bin along axis 1, of the light bin along axis 2. A missing
    # sample (-1) reads the last sample's values here and is masked out below.
    give, take = heavy_PW[:, :, None], light_PW[:, None, :]
    longer = lengths[give] - lengths[take]
    dearer = costs[give] - costs[take]
    allowed = (
        (give >= 0)
        & (take >= 0)
        & (longer <= light_room_P[:, None, None])
        & (-longer <= heavy_room_P[:, None, None])
        & (dearer > 0)
    )
    closed = np.where(allowed, gap_closed(gap_P[:, None, None], dearer), 0)
    # argmax over both sample axes as one; divmod by W takes the flat place apart again.
    closed_PWW = closed.reshape(gap_P.size, -1)
    best_P = closed_PWW.argmax(axis=1)
    pair_P = np.arange(gap_P.size)
    from_heavy, from_light = divmod(best_P, light_PW.shape[1])
    return heavy_PW[pair_P, from_heavy], light_PW[pair_P, from_light], closed_PWW[pair_P, best_P]
