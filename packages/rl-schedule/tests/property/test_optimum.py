"""Against brute force on tiny steps: our plans are near the optimum, and no bound is above it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.balancing.bounds import cost_bounds, micro_batch_bound, rank_bound, slot_bound
from rl_schedule.statistics import rank_imbalance, slot_imbalance

Array = np.ndarray[Any, Any]


class SubsetOptimum:
    """The best costliest rank over all plans of n <= 9 samples, by dynamic programming on subsets.

    The number of bins is fixed.
    """

    def __init__(self, count: int) -> None:
        pairs = [(mask, sub) for mask in range(1 << count) for sub in _submasks(mask)]
        self.count = count
        self.mask = np.array([mask for mask, _ in pairs])
        self.sub = np.array([sub for _, sub in pairs])
        self.rest = self.mask ^ self.sub
        self.starts = np.searchsorted(self.mask, np.arange(1 << count))
        self.bits = np.array([[mask >> i & 1 for i in range(count)] for mask in range(1 << count)])
        self.sizes = self.bits.sum(axis=1)

    def feasible_in(self, tokens: Array, cap: int, num_bins: int) -> Array:
        """Whether each subset fits into at most `num_bins` bins."""
        one = (tokens <= cap) | (self.sizes <= 1)
        fits: Array = one.copy()
        for _ in range(num_bins - 1):
            fits = np.logical_or.reduceat(one[self.sub] & fits[self.rest], self.starts)
        return np.asarray(fits)

    def best_rank(
        self, lengths: Array, costs: Array, cap: int, ranks: int, slots: int
    ) -> int | None:
        """Cost of the costliest rank in the best plan, None if there is none.

        The plan has no empty bin, or single samples only.
        """
        fits = self.feasible_in(self.bits @ lengths, cap, slots)
        whole = (
            fits & (self.sizes >= slots)
            if self.count >= ranks * slots
            else fits & (self.sizes <= slots)
        )
        weight = np.where(whole, self.bits @ costs, np.iinfo(np.int64).max)
        best = weight
        for _ in range(ranks - 1):
            best = np.minimum.reduceat(np.maximum(weight[self.sub], best[self.rest]), self.starts)
        return None if best[-1] == np.iinfo(np.int64).max else int(best[-1])


def _submasks(mask: int) -> list[int]:
    found, sub = [0], mask
    while sub:
        found.append(sub)
        sub = (sub - 1) & mask
    return found


@pytest.mark.parametrize("count", range(1, 10))
def test_costliest_rank_is_within_five_percent_of_the_optimum(count: int) -> None:
    """2,000 random steps over all counts (issue 4, point 4): worst ratio <= 1.05."""
    optimum = SubsetOptimum(count)
    rng = np.random.default_rng(count)
    compared = 0
    for _ in range(223):
        cap = int(rng.integers(4, 60))
        lengths = rng.integers(1, int(rng.choice([cap, cap // 2 + 1, cap + 8])) + 1, count)
        ranks = int(rng.integers(1, 5))
        linear = int(rng.choice([0, 1, 20, 400]))
        request = rs.ScheduleRequest(
            total_lengths=lengths,
            rollout_ids=range(count),
            global_batch_size=count,
            dp_size=ranks,
            max_tokens_per_gpu=cap,
            cost=rs.QuadraticCost(linear=linear),
        )
        plan = rs.plan_schedule(request)
        assert rs.check_plan(plan, request) == []
        costs = linear * lengths + lengths**2
        best = optimum.best_rank(lengths, costs, cap, ranks, plan.num_microbatches[0])
        assert best is not None
        ours = max(int(costs[partition].sum()) for partition in plan.partitions)
        assert best <= ours <= 1.05 * best, (lengths.tolist(), cap, ranks, linear)
        compared += 1
    assert compared == 223


def _partitions(count: int, bins: int) -> Iterator[list[int]]:
    """Every partition of 0..count-1 into at most `bins` sets, as the set of each."""

    def extend(prefix: list[int], used: int) -> Iterator[list[int]]:
        if len(prefix) == count:
            yield list(prefix)
            return
        for choice in range(min(used + 1, bins)):
            yield from extend([*prefix, choice], max(used, choice + 1))

    yield from extend([], 0)


def test_no_bound_is_above_any_plan() -> None:
    """All partitions of 120 random steps of up to 7 samples, dealt level and at random."""
    rng = np.random.default_rng(7)
    for _ in range(120):
        count, cap, ranks = (
            int(rng.integers(1, 8)),
            int(rng.integers(3, 30)),
            int(rng.integers(1, 4)),
        )
        slots = int(rng.integers(1, 4))
        bins = ranks * slots
        lengths = np.sort(rng.integers(1, cap + 1, count))[::-1].copy()
        costs = int(rng.choice([0, 3, 50])) * lengths + lengths**2
        bounds = cost_bounds(lengths, costs, cap, num_ranks=ranks, num_slots=slots)
        any_ranks, lowest_rank, least = (
            slot_bound(bounds),
            rank_bound(lengths, costs, cap, num_ranks=ranks, num_slots=slots),
            count,
        )
        for partition in _partitions(count, count):
            tokens = np.bincount(partition, weights=lengths)
            if tokens.max() > cap:
                continue
            least = min(least, max(partition) + 1)
            if max(partition) >= bins:
                continue
            sums = np.bincount(partition, weights=costs, minlength=bins).astype(np.int64)
            for deal in (
                np.sort(sums)[::-1].reshape(slots, ranks).T,
                rng.permutation(sums).reshape(ranks, slots),
            ):
                placed = -np.sort(-deal, axis=1)
                rank, slot = rank_imbalance(placed), slot_imbalance(placed)
                assert rank >= lowest_rank - 1e-12
                assert slot >= any_ranks - 1e-12
                assert slot >= slot_bound(bounds, rank_limit=rank) - 1e-12
                assert np.all(np.sort(sums)[::-1] <= bounds.ceiling)
                assert np.all(placed.max(axis=0) >= bounds.floor)
        assert micro_batch_bound(lengths, cap) <= least
