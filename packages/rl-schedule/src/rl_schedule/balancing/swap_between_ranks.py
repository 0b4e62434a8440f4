"""What the costliest rank hands to a cheap one: one sample for another, under the cap.

The costliest rank meets the cheapest one; of all pairs of their samples that may change places, and
all samples that may move, those that close most of the gap do. A rank that can take nothing makes
way for the next cheapest, until something has changed.

Invariants: the cap holds; every rank keeps its number of micro-batches and none gets empty; no
exchange makes the costlier of two ranks costlier; bounded by counts.

Axis letters: N samples, D ranks, M slots, K = D * M bins; G samples that the costly rank may give,
T samples that the cheap one may give back.
"""

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.swap_between_bins import gap_closed
from rl_schedule.packing import bin_sums

__all__ = ["level_ranks"]

_MEETINGS_PER_RANK, _LEAST_MEETINGS = 4, 64
"""Pairs of ranks that meet at most: four for each rank, or 64."""

_MOST_CANDIDATES = 512
"""Samples of a rank that are looked at, evenly spread over its lengths."""

_CLOSE = 4_000
"""Stop when the costliest rank is within 1 / _CLOSE of the mean."""

_LEAST_GAIN = 50_000
"""An exchange closes at least 1 / _LEAST_GAIN of the mean."""


def level_ranks(
    bin_of: IntArray,
    lengths: IntArray,
    costs: IntArray,
    *,
    cap: int,
    num_ranks: int,
    num_slots: int,
) -> IntArray:
    """Exchange samples of the costliest rank until nothing helps it.

    Args:
        bin_of: int64 [N], rank-major bin of each sample.
        lengths: int64 [N].
        costs: int64 [N].
        cap: tokens per bin.
        num_ranks: D.
        num_slots: M, bins per rank.

    Returns:
        The rank-major bins, int64 [N].
    """
    state = _Ranks(bin_of, lengths, costs, cap, num_ranks, num_slots)
    total = int(costs.sum())
    # Ranks that could take nothing from a costliest one, and whether anything changed since.
    spent_D = np.zeros(num_ranks, dtype=bool)
    changed = False
    for _ in range(max(_LEAST_MEETINGS, _MEETINGS_PER_RANK * num_ranks)):
        heavy = int(state.load_D.argmax())
        # max / mean <= 1 + 1 / _CLOSE, in integers.
        if (int(state.load_D[heavy]) * num_ranks - total) * _CLOSE <= total:
            break
        waiting_D = ~spent_D & (state.load_D < state.load_D[heavy])
        if not waiting_D.any():
            if not changed:
                break
            spent_D[:], changed = False, False
            continue
        light = int(np.where(waiting_D, state.load_D, total + 1).argmin())
        if state.exchange(heavy, light):
            changed = True
        else:
            spent_D[light] = True
    return state.bin_of


class _Ranks:
    """Bins of all ranks under exchange, and which samples each rank holds."""

    def __init__(
        self,
        bin_of: IntArray,
        lengths: IntArray,
        costs: IntArray,
        cap: int,
        num_ranks: int,
        num_slots: int,
    ) -> None:
        num_bins = num_ranks * num_slots
        self.lengths, self.costs, self.bin_of = lengths, costs, bin_of.copy()
        self.num_slots = num_slots
        self.room_K = cap - bin_sums(lengths, bin_of, num_bins)
        self.count_K = np.bincount(bin_of, minlength=num_bins)
        self.load_D = bin_sums(costs, bin_of // num_slots, num_ranks)
        order = np.argsort(bin_of // num_slots, kind="stable")
        ends = np.cumsum(np.bincount(bin_of // num_slots, minlength=num_ranks))
        self.members = np.split(order, ends[:-1])
        self.least_gain = -(-int(costs.sum()) // (num_ranks * _LEAST_GAIN))

    def exchange(self, heavy: int, light: int) -> bool:
        """Swap the two samples, or move the one, that close most of the gap; tell if there are."""
        gap = int(self.load_D[heavy] - self.load_D[light])
        step_G, step_T = (
            max(1, -(-self.members[rank].size // _MOST_CANDIDATES)) for rank in (heavy, light)
        )
        give_G, take_T = self.members[heavy][::step_G], self.members[light][::step_T]
        bin_G, bin_T = self.bin_of[give_G], self.bin_of[take_T]
        # One more column than samples to take: nothing comes back, and the roomiest bin takes it.
        first = light * self.num_slots
        roomiest = first + int(self.room_K[first : first + self.num_slots].argmax())
        room_T = self.room_K[np.append(bin_T, roomiest)]
        longer_GT = self.lengths[give_G][:, None] - np.append(self.lengths[take_T], 0)
        allowed_GT = longer_GT <= room_T
        allowed_GT &= longer_GT >= -self.room_K[bin_G][:, None]
        allowed_GT[:, -1] &= self.count_K[bin_G] > 1
        dearer_GT = self.costs[give_G][:, None] - np.append(self.costs[take_T], 0)
        closed_GT = gap_closed(gap, dearer_GT)
        closed_GT[~allowed_GT] = 0
        row, column = _argmax(closed_GT)
        if int(closed_GT[row, column]) < self.least_gain:
            return False
        source, target = int(bin_G[row]), int(np.append(bin_T, roomiest)[column])
        taken = take_T[column : column + 1]
        self._put(give_G[row : row + 1], source, target)
        self._put(taken, target, source)
        for rank, place, arrived in (
            (heavy, row * step_G, taken),
            (light, column * step_T, give_G[row : row + 1]),
        ):
            left = self.members[rank]
            # Nothing comes back when a sample moves: then `place` is past the end.
            self.members[rank] = np.concatenate([left[:place], left[place + 1 :], arrived])
        return True

    def _put(self, samples: IntArray, source: int, target: int) -> None:
        """Move a sample, or none, from one bin to another one and keep the books of both."""
        self.bin_of[samples] = target
        tokens, cost = int(self.lengths[samples].sum()), int(self.costs[samples].sum())
        for number, sign in ((source, -1), (target, 1)):
            self.room_K[number] -= sign * tokens
            self.count_K[number] += sign * samples.size
            self.load_D[number // self.num_slots] += sign * cost


def _argmax(table: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return row and column of the first largest entry."""
    return divmod(int(table.argmax()), int(table.shape[1]))
