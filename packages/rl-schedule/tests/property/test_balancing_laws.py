"""Laws of the balancing methods on random feasible packings."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.rank_assignment import arrange_slots, fill_empty_bins
from rl_schedule.balancing.swap_between_bins import level_bins
from rl_schedule.balancing.swap_between_ranks import level_ranks
from rl_schedule.balancing.two_level import LptState, two_level_lpt
from rl_schedule.packing.bins import bin_sums
from rl_schedule.packing.karmarkar_karp import deal_by_differencing, karmarkar_karp
from rl_schedule.statistics import rank_imbalance, slot_imbalance


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Samples, longest first, in bins under a cap."""

    lengths: IntArray
    costs: IntArray
    bins: IntArray
    cap: int
    ranks: int
    slots: int

    @property
    def num_bins(self) -> int:
        return self.ranks * self.slots

    def tokens(self, bins: IntArray) -> IntArray:
        return bin_sums(self.lengths, bins, self.num_bins)

    def sums(self, bins: IntArray) -> IntArray:
        return bin_sums(self.costs, bins, self.num_bins)


@st.composite
def packed(draw: st.DrawFn) -> Packed:
    ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    samples = draw(
        st.lists(
            st.tuples(st.integers(1, 30), st.integers(0, ranks * slots - 1)),
            min_size=1,
            max_size=50,
        )
    )
    samples.sort(key=lambda sample: -sample[0])
    lengths = np.array([length for length, _ in samples], dtype=np.int64)
    bins = np.array([number for _, number in samples], dtype=np.int64)
    cap = int(bin_sums(lengths, bins, ranks * slots).max()) + draw(st.integers(0, 5))
    return Packed(
        lengths=lengths,
        costs=draw(st.integers(0, 20)) * lengths + lengths**2,
        bins=bins,
        cap=cap,
        ranks=ranks,
        slots=slots,
    )


@given(packed())
def test_levelling_keeps_cap_and_costs_and_never_raises_the_costliest_bin(case: Packed) -> None:
    level = int(case.costs.sum()) // case.num_bins
    levelled = level_bins(
        case.bins, case.lengths, case.costs, cap=case.cap, num_bins=case.num_bins, level=level
    )
    assert case.tokens(levelled).max() <= case.cap
    assert case.sums(levelled).max() <= case.sums(case.bins).max()
    assert np.array_equal(
        np.bincount(levelled, minlength=case.num_bins),
        np.bincount(case.bins, minlength=case.num_bins),
    )


@given(packed())
def test_exchange_keeps_cap_and_filled_bins_and_never_raises_the_costliest_rank(
    case: Packed,
) -> None:
    levelled = level_ranks(
        case.bins,
        case.lengths,
        case.costs,
        cap=case.cap,
        num_ranks=case.ranks,
        num_slots=case.slots,
    )
    assert case.tokens(levelled).max() <= case.cap
    assert rank_imbalance(case.sums(levelled).reshape(case.ranks, -1)) <= rank_imbalance(
        case.sums(case.bins).reshape(case.ranks, -1)
    )
    assert len(set(levelled.tolist())) >= len(set(case.bins.tolist()))


@given(packed())
def test_two_level_lpt_keeps_the_cap(case: Packed) -> None:
    state = LptState.empty(
        num_ranks=case.ranks,
        num_slots=case.slots,
        cap=case.cap,
        targets=[int(case.costs.sum())] * case.slots,
    )
    chosen = two_level_lpt(case.lengths.tolist(), case.costs.tolist(), state, case.cap)
    if chosen is not None:
        assert case.tokens(np.array(chosen)).max() <= case.cap


@given(packed())
def test_arranging_slots_changes_neither_ranks_nor_raises_the_slots(case: Packed) -> None:
    arranged = arrange_slots(case.bins, case.costs, num_ranks=case.ranks, num_slots=case.slots)
    before, after = (
        case.sums(bins).reshape(case.ranks, case.slots) for bins in (case.bins, arranged)
    )
    assert before.sum(axis=1).tolist() == after.sum(axis=1).tolist()
    assert slot_imbalance(after) <= slot_imbalance(before)


@given(packed())
def test_no_bin_stays_empty_while_another_holds_two(case: Packed) -> None:
    filled = np.bincount(
        fill_empty_bins(case.bins, case.costs, num_ranks=case.ranks, num_bins=case.num_bins),
        minlength=case.num_bins,
    )
    assert filled.min() >= 1 or filled.max() <= 1


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_differencing_places_each_weight_once(weights: list[int], k: int) -> None:
    sets = karmarkar_karp(weights, k)
    assert len(sets) == k
    assert sorted(i for members in sets for i in members) == list(range(len(weights)))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_equal_hands_are_equal_and_no_further_apart_than_the_heaviest_weight(
    k: int, size: int, seed: int
) -> None:
    weights = np.random.default_rng(seed).integers(0, 1000, k * size)
    hands = deal_by_differencing(weights, k)
    assert hands.shape == (k, size)
    assert sorted(hands.ravel().tolist()) == list(range(k * size))
    sums = weights[hands].sum(axis=1)
    assert sums.max() - sums.min() <= weights.max()
