"""Cap-safe exchanges between ranks: whole micro-batches, then single samples; algorithm layer.

Decides what a costly rank hands to a cheap one when packing alone left them apart. Invariants: the
cap holds; every rank keeps its number of micro-batches and none gets empty; no exchange makes the
costlier of two ranks costlier; bounded by counts.
"""

from typing import NamedTuple

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.dealing import bin_sums, number_bins
from rl_schedule.packing import group_bins

__all__ = ["level_ranks"]

_ROUNDS = 24
"""Rounds of pairing the i-th costliest with the i-th cheapest rank."""

_NEIGHBOURS = 4
"""Partners tried per sample, around the one whose cost would close the gap exactly."""

_RUN_BINS = 8
"""Bins of the cheap rank, roomiest first, in which a run is sought."""

_RUN_STARTS = 16
"""Starts tried for a run of shorter samples, from the longest that is shorter than the sample it replaces."""

_MOST_PAIRS = 4_000
"""Pairs of ranks tried at most over all rounds, costliest first: a few seconds where there are thousands of ranks."""

_CLOSE = 4000
"""Stop when the costliest rank is within 1 / _CLOSE of the mean."""


class _Trade(NamedTuple):
    """What one pair of ranks could do."""

    shrink: int
    """By how much the gap between the two ranks gets smaller; <= 0: nothing."""
    give: int = 0
    """Sample that leaves the costly rank."""
    take: tuple[int, ...] = ()
    """Samples that come back."""
    target: int = 0
    """Bin of the cheap rank that takes `give`."""


def level_ranks(
    bin_of: IntArray,
    lengths: IntArray,
    costs: IntArray,
    *,
    cap: int,
    num_ranks: int,
    num_slots: int,
) -> IntArray:
    """Exchange micro-batches and samples between costly and cheap ranks until they are level or
    nothing helps.

    Args:
        bin_of: int64 [n], rank-major bin of each sample.
        lengths: int64 [n].
        costs: int64 [n].
        cap: tokens per bin.
        num_ranks: ranks.
        num_slots: bins per rank.

    Returns:
        The rank-major bins, int64 [n].
    """
    state = _Ranks(bin_of, lengths, costs, cap, num_ranks, num_slots)
    total, half, pairs_tried = int(costs.sum()), num_ranks // 2, 0
    for _ in range(_ROUNDS):
        if (int(state.loads.max()) * num_ranks - total) * _CLOSE <= total:
            break
        by_load = np.argsort(-state.loads, kind="stable").tolist()
        pairs = list(zip(by_load[:half], by_load[::-1][:half], strict=True))[
            : _MOST_PAIRS - pairs_tried
        ]
        exchanged = [
            state.swap_bins(heavy, light) or state.trade(heavy, light) for heavy, light in pairs
        ]
        pairs_tried += len(pairs)
        if not any(exchanged):
            break
    return state.assignment()


class _Ranks:
    """Bins of all ranks under exchange.

    A bin keeps its number when it changes rank; `bins` says where it is.
    """

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
        self.members = group_bins(bin_of, num_bins)
        self.sums = bin_sums(costs, bin_of, num_bins)
        self.rooms = cap - bin_sums(lengths, bin_of, num_bins)
        self.bins: IntArray = np.arange(num_bins, dtype=np.int64).reshape(num_ranks, num_slots)
        self.loads: IntArray = self.sums.reshape(num_ranks, num_slots).sum(axis=1)

    def assignment(self) -> IntArray:
        """Return the rank-major bin of each sample."""
        return number_bins([self.members[b] for b in self.bins.ravel().tolist()], self.lengths.size)

    def swap_bins(self, heavy: int, light: int) -> bool:
        """Swap two bins of the same cost rank, else any two, if that closes at least half of the
        gap.

        Swapping the k-th costliest of one rank for that of the other leaves the costliest of each
        slot as they are.
        """
        gap = int(self.loads[heavy] - self.loads[light])
        if gap <= 0:
            return False
        first, second = (
            self.bins[rank][np.argsort(-self.sums[self.bins[rank]], kind="stable")]
            for rank in (heavy, light)
        )
        difference = self.sums[first][:, None] - self.sums[second][None, :]
        shrink = gap - np.abs(gap - 2 * difference)
        row = column = int(shrink.diagonal().argmax())
        if 2 * int(shrink[row, column]) < gap:
            row, column = divmod(int(shrink.argmax()), difference.shape[1])
        if 2 * int(shrink[row, column]) < gap:
            return False
        one, other = first[row], second[column]
        self.bins[heavy] = np.where(self.bins[heavy] == one, other, self.bins[heavy])
        self.bins[light] = np.where(self.bins[light] == other, one, self.bins[light])
        self.loads[heavy] -= difference[row, column]
        self.loads[light] += difference[row, column]
        return True

    def trade(self, heavy: int, light: int) -> bool:
        """Move one sample, exchange two, or exchange one for several shorter ones, so that the gap shrinks most."""
        gap = int(self.loads[heavy] - self.loads[light])
        if gap <= 0:
            return False
        give = self._samples(heavy)
        trades = [
            self._best_move(give, light, gap),
            self._best_exchange(give, self._samples(light), gap),
        ]
        if 2 * max(trade.shrink for trade in trades) < gap:
            roomiest = self.bins[light][np.argsort(-self.rooms[self.bins[light]], kind="stable")][
                :_RUN_BINS
            ]
            trades.extend(self._best_run(give, target, gap) for target in roomiest.tolist())
        best = max(trades, key=lambda trade: trade.shrink)
        if best.shrink <= 0:
            return False
        source = int(self.bin_of[best.give])
        moved = int(self.costs[best.give])
        self._put(best.give, best.target)
        for sample in best.take:
            moved -= int(self.costs[sample])
            self._put(sample, source)
        self.loads[heavy] -= moved
        self.loads[light] += moved
        return True

    def _samples(self, rank: int) -> IntArray:
        return np.asarray(
            [i for b in self.bins[rank].tolist() for i in self.members[b]], dtype=np.int64
        )

    def _best_move(self, give: IntArray, light: int, gap: int) -> _Trade:
        """Find the best single move into the roomiest bin of `light`."""
        if not give.size:
            return _Trade(0)
        target = int(self.bins[light][np.argmax(self.rooms[self.bins[light]])])
        alone = np.asarray([len(self.members[b]) == 1 for b in self.bin_of[give].tolist()])
        allowed = (self.lengths[give] <= self.rooms[target]) & ~alone
        shrink = np.where(allowed, gap - np.abs(gap - 2 * self.costs[give]), 0)
        best = int(shrink.argmax())
        return _Trade(int(shrink[best]), int(give[best]), (), target)

    def _best_exchange(self, give: IntArray, take: IntArray, gap: int) -> _Trade:
        """Find the best exchange of two samples in place."""
        if not give.size or not take.size:
            return _Trade(0)
        take = take[np.argsort(self.costs[take], kind="stable")]
        ideal = np.searchsorted(self.costs[take], self.costs[give] - gap // 2)
        around = np.clip(
            ideal[:, None] + np.arange(-_NEIGHBOURS // 2, _NEIGHBOURS // 2), 0, take.size - 1
        )
        other = take[around]
        longer = self.lengths[give][:, None] - self.lengths[other]
        dearer = self.costs[give][:, None] - self.costs[other]
        allowed = (longer <= self.rooms[self.bin_of[other]]) & (
            -longer <= self.rooms[self.bin_of[give]][:, None]
        )
        shrink = np.where(allowed, gap - np.abs(gap - 2 * dearer), 0)
        row, column = divmod(int(shrink.argmax()), other.shape[1])
        partner = int(other[row, column])
        return _Trade(
            int(shrink[row, column]), int(give[row]), (partner,), int(self.bin_of[partner])
        )

    def _best_run(self, give: IntArray, target: int, gap: int) -> _Trade:
        """Find the best exchange of one sample for a run of shorter ones, consecutive by length,
        out of bin `target`.

        In full bins only exchanges of about equal tokens fit, and among those one long sample for
        several short ones is what lowers a cost that rises faster than the tokens.
        """
        members = np.asarray(
            sorted(self.members[target], key=lambda i: -int(self.lengths[i])), dtype=np.int64
        )
        if members.size < 2 or not give.size:
            return _Trade(0)
        tokens = np.concatenate([[0], np.cumsum(self.lengths[members])])
        worth = np.concatenate([[0], np.cumsum(self.costs[members])])
        first = np.searchsorted(-self.lengths[members], -self.lengths[give], side="right")
        start = np.minimum(first[:, None] + np.arange(_RUN_STARTS), members.size)
        most = (self.lengths[give] + self.rooms[self.bin_of[give]])[:, None]
        end = np.searchsorted(tokens, tokens[start] + most, side="right") - 1
        taken = tokens[end] - tokens[start]
        allowed = (end > start) & (self.lengths[give][:, None] - taken <= self.rooms[target])
        dearer = self.costs[give][:, None] - (worth[end] - worth[start])
        shrink = np.where(allowed, gap - np.abs(gap - 2 * dearer), 0)
        row, column = divmod(int(shrink.argmax()), shrink.shape[1])
        run = tuple(members[start[row, column] : end[row, column]].tolist())
        return _Trade(int(shrink[row, column]), int(give[row]), run, target)

    def _put(self, sample: int, target: int) -> None:
        source = int(self.bin_of[sample])
        self.members[source].remove(sample)
        self.members[target].append(sample)
        self.bin_of[sample] = target
        for number, sign in ((source, -1), (target, 1)):
            self.sums[number] += sign * self.costs[sample]
            self.rooms[number] -= sign * self.lengths[sample]
