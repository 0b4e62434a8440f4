"""What a costly rank hands to a cheap one: whole micro-batches, then single samples, under the cap.

Ranks are paired, the costliest with the cheapest. A pair first swaps two micro-batches, which never
breaks the cap; only where no swap closes half of the gap, samples move.

Invariants: the cap holds; every rank keeps its number of micro-batches and none gets empty; no
exchange makes the costlier of two ranks costlier; bounded by counts.

Axis letters: N samples, D ranks, M slots, K = D * M bins; G samples that the costly rank may give,
T samples that the cheap one may give back, A alternatives tried per given sample.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.swap_between_bins import gap_closed
from rl_schedule.packing import bin_sums, group_bins, number_bins

__all__ = ["level_ranks"]

_ROUNDS = 24
"""Rounds of pairing the i-th costliest with the i-th cheapest rank."""

_NEIGHBOURS = 4
"""Partners tried per sample, around the one whose cost would close the gap exactly."""

_RUN_BINS = 8
"""Bins of the cheap rank, roomiest first, in which a run is sought."""

_RUN_STARTS = 16
"""Starts tried for a run of shorter samples, from the longest that is shorter on."""

_MOST_PAIRS = 4_000
"""Pairs of ranks tried at most over all rounds: a few seconds for thousands of ranks."""

_CLOSE = 4000
"""Stop when the costliest rank is within 1 / _CLOSE of the mean."""


class _Trade(NamedTuple):
    """An exchange of samples between a costly and a cheap rank."""

    closed: int
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
    """Exchange micro-batches and samples between ranks until they are level or nothing helps.

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
    total, half, pairs_left = int(costs.sum()), num_ranks // 2, _MOST_PAIRS
    for _ in range(_ROUNDS):
        # max / mean <= 1 + 1 / _CLOSE, in integers.
        if (int(state.load_D.max()) * num_ranks - total) * _CLOSE <= total:
            break
        by_load = np.argsort(-state.load_D, kind="stable").tolist()
        pairs = list(zip(by_load[:half], by_load[::-1][:half], strict=True))[:pairs_left]
        pairs_left -= len(pairs)
        # A list first, so that every pair gets its turn in every round.
        exchanged = [state.exchange(heavy, light) for heavy, light in pairs]
        if not any(exchanged):
            break
    return state.assignment()


class _Ranks:
    """Bins of all ranks under exchange.

    A bin keeps its number when it changes rank; `bins_DM` says where it is.
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
        self.cost_K = bin_sums(costs, bin_of, num_bins)
        self.room_K = cap - bin_sums(lengths, bin_of, num_bins)
        self.bins_DM: IntArray = np.arange(num_bins, dtype=np.int64).reshape(num_ranks, num_slots)
        self.load_D: IntArray = self.cost_K.reshape(num_ranks, num_slots).sum(axis=1)

    def assignment(self) -> IntArray:
        """Return the rank-major bin of each sample."""
        members = [self.members[b] for b in self.bins_DM.ravel().tolist()]
        return number_bins(members, self.lengths.size)

    def exchange(self, heavy: int, light: int) -> bool:
        """Bring two ranks closer together; tell whether anything changed hands."""
        gap = int(self.load_D[heavy] - self.load_D[light])
        if gap <= 0:
            return False
        moved = self._swap_bins(heavy, light, gap) or self._trade(heavy, light, gap)
        self.load_D[heavy] -= moved
        self.load_D[light] += moved
        return moved > 0

    def _swap_bins(self, heavy: int, light: int, gap: int) -> int:
        """Swap two bins if that closes at least half of the gap; return the cost that moved, or 0.

        Two bins of the same cost rank are preferred: swapping the k-th costliest of one rank for
        that of the other leaves the costliest of each slot as they are.
        """
        heavy_M, light_M = (
            self.bins_DM[rank][np.argsort(-self.cost_K[self.bins_DM[rank]], kind="stable")]
            for rank in (heavy, light)
        )
        dearer_MM = self.cost_K[heavy_M][:, None] - self.cost_K[light_M][None, :]
        closed_MM = gap_closed(gap, dearer_MM)
        row = column = int(closed_MM.diagonal().argmax())
        if 2 * int(closed_MM[row, column]) < gap:
            row, column = _argmax(closed_MM)
        if 2 * int(closed_MM[row, column]) < gap:
            return 0
        one, other = heavy_M[row], light_M[column]
        for rank, out, into in ((heavy, one, other), (light, other, one)):
            self.bins_DM[rank][self.bins_DM[rank] == out] = into
        return int(dearer_MM[row, column])

    def _trade(self, heavy: int, light: int, gap: int) -> int:
        """Trade samples so that the gap shrinks most; return the cost that moved, or 0.

        One sample moves, two change places, or one changes for several shorter ones.
        """
        # Never empty: the rank is costlier than another, so it has samples.
        give_G = self._samples(heavy)
        trades = [
            self._best_move(give_G, light, gap),
            self._best_exchange(give_G, self._samples(light), gap),
        ]
        if 2 * max(trade.closed for trade in trades) < gap:
            bins_M = self.bins_DM[light]
            roomiest = bins_M[np.argsort(-self.room_K[bins_M], kind="stable")][:_RUN_BINS]
            trades.extend(self._best_run(give_G, target, gap) for target in roomiest.tolist())
        best = max(trades, key=lambda trade: trade.closed)
        if best.closed <= 0:
            return 0
        source = int(self.bin_of[best.give])
        self._put(best.give, best.target)
        for sample in best.take:
            self._put(sample, source)
        return int(self.costs[best.give]) - sum(int(self.costs[sample]) for sample in best.take)

    def _samples(self, rank: int) -> IntArray:
        return np.asarray(
            [i for b in self.bins_DM[rank].tolist() for i in self.members[b]], dtype=np.int64
        )

    def _best_move(self, give_G: IntArray, light: int, gap: int) -> _Trade:
        """Find the best single move into the roomiest bin of `light`."""
        bins_M = self.bins_DM[light]
        target = int(bins_M[np.argmax(self.room_K[bins_M])])
        alone_G = np.asarray([len(self.members[b]) == 1 for b in self.bin_of[give_G].tolist()])
        allowed_G = (self.lengths[give_G] <= self.room_K[target]) & ~alone_G
        closed_G = np.where(allowed_G, gap_closed(gap, self.costs[give_G]), 0)
        best = int(closed_G.argmax())
        return _Trade(int(closed_G[best]), int(give_G[best]), (), target)

    def _best_exchange(self, give_G: IntArray, take_T: IntArray, gap: int) -> _Trade:
        """Find the best exchange of two samples in place."""
        if not take_T.size:
            return _Trade(0)
        take_T = take_T[np.argsort(self.costs[take_T], kind="stable")]
        # The gap closes exactly when the partner is cheaper by half of it; only partners next to
        # that cost are tried, because the closest of them may not fit.
        ideal_G = np.searchsorted(self.costs[take_T], self.costs[give_G] - gap // 2)
        nearby_A = np.arange(-_NEIGHBOURS // 2, _NEIGHBOURS // 2)
        take_GA = take_T[np.clip(ideal_G[:, None] + nearby_A, 0, take_T.size - 1)]
        longer_GA = self.lengths[give_G][:, None] - self.lengths[take_GA]
        dearer_GA = self.costs[give_G][:, None] - self.costs[take_GA]
        allowed_GA = (longer_GA <= self.room_K[self.bin_of[take_GA]]) & (
            -longer_GA <= self.room_K[self.bin_of[give_G]][:, None]
        )
        closed_GA = np.where(allowed_GA, gap_closed(gap, dearer_GA), 0)
        row, column = _argmax(closed_GA)
        take = int(take_GA[row, column])
        return _Trade(
            int(closed_GA[row, column]), int(give_G[row]), (take,), int(self.bin_of[take])
        )

    def _best_run(self, give_G: IntArray, target: int, gap: int) -> _Trade:
        """Find the best exchange of one sample for several shorter ones of bin `target`.

        They are a run, consecutive by length. In full bins only exchanges of about equal tokens
        fit, and among those one long sample for several short ones is what lowers a cost that rises
        faster than the tokens.
        """
        members_T = np.asarray(
            sorted(self.members[target], key=lambda i: -int(self.lengths[i])), dtype=np.int64
        )
        if members_T.size < 2:
            return _Trade(0)
        # Prefix sums: the run from s to e has tokens[e] - tokens[s]; `worth` is the same for costs.
        tokens = np.concatenate([[0], np.cumsum(self.lengths[members_T])])
        worth = np.concatenate([[0], np.cumsum(self.costs[members_T])])
        # Negated, because searchsorted needs ascending values: the first member shorter than give.
        shorter_G = np.searchsorted(-self.lengths[members_T], -self.lengths[give_G], side="right")
        start_GA = np.minimum(shorter_G[:, None] + np.arange(_RUN_STARTS), members_T.size)
        # From each start the longest run that fits into the place that `give` leaves.
        most_G1 = (self.lengths[give_G] + self.room_K[self.bin_of[give_G]])[:, None]
        end_GA = np.searchsorted(tokens, tokens[start_GA] + most_G1, side="right") - 1
        longer_GA = self.lengths[give_G][:, None] - (tokens[end_GA] - tokens[start_GA])
        allowed_GA = (end_GA > start_GA) & (longer_GA <= self.room_K[target])
        dearer_GA = self.costs[give_G][:, None] - (worth[end_GA] - worth[start_GA])
        closed_GA = np.where(allowed_GA, gap_closed(gap, dearer_GA), 0)
        row, column = _argmax(closed_GA)
        run = tuple(members_T[start_GA[row, column] : end_GA[row, column]].tolist())
        return _Trade(int(closed_GA[row, column]), int(give_G[row]), run, target)

    def _put(self, sample: int, target: int) -> None:
        """Move one sample and keep the books of both bins; loads of ranks are the caller's."""
        source = int(self.bin_of[sample])
        self.members[source].remove(sample)
        self.members[target].append(sample)
        self.bin_of[sample] = target
        for number, sign in ((source, -1), (target, 1)):
            self.cost_K[number] += sign * self.costs[sample]
            self.room_K[number] -= sign * self.lengths[sample]


def _argmax(table: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return row and column of the first largest entry."""
    return divmod(int(table.argmax()), int(table.shape[1]))
