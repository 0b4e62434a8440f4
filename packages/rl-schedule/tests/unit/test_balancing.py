"""The parts of balanced packing on inputs small enough to work out by hand."""

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.balancing.bounds import (
    MOST_SLACK,
    cost_bounds,
    head_starts,
    micro_batch_bound,
    rank_bound,
    slot_bound,
    slot_targets,
    useful_slack,
)
from rl_schedule.balancing.exact import search_exactly
from rl_schedule.balancing.greedy import pack_by_cost, pack_squares_first, top_up
from rl_schedule.balancing.pack_long_first import pack_long_first
from rl_schedule.balancing.problem import PlainPackings, StepProblem
from rl_schedule.balancing.rank_assignment import arrange_slots, fill_empty_bins, pipeline_order
from rl_schedule.balancing.swap_between_bins import level_bins
from rl_schedule.balancing.swap_between_ranks import level_ranks
from rl_schedule.balancing.two_level import LptState, two_level_lpt
from rl_schedule.packing.bins import bin_sums, round_up, split_bins
from rl_schedule.statistics import rank_imbalance, slot_imbalance


def problem(
    lengths: list[int], *, cap: int, ranks: int, slots: int, linear: int = 0
) -> StepProblem:
    column = np.sort(np.array(lengths, dtype=np.int64))[::-1].copy()
    return StepProblem(
        lengths=column,
        costs=linear * column + column**2,
        cap=cap,
        num_ranks=ranks,
        num_slots=slots,
        packings=PlainPackings(column, cap),
    )


def lognormal(count: int, cap: int, seed: int, mean: float = 7.6) -> list[int]:
    lengths: list[int] = (
        np.clip(np.rint(np.random.default_rng(seed).lognormal(mean, 0.9, count)), 64, cap)
        .astype(int)
        .tolist()
    )
    return lengths


@pytest.mark.parametrize(
    ("lengths", "cap", "bins"),
    [([], 8, 0), ([7] * 3, 8, 3), ([5, 5, 5], 8, 3), ([4, 4, 4], 8, 2), ([9, 1], 8, 2)],
)
def test_bound_on_micro_batches(lengths: list[int], cap: int, bins: int) -> None:
    assert micro_batch_bound(np.array(lengths, dtype=np.int64), cap) == bins


def test_bound_on_micro_batches_sees_what_cannot_share_with_the_long_ones() -> None:
    """Under 10 three 7s are apart, and their room of 3 takes none of the 4s, which need two more.

    That is 5, not ceil(33 / 10) = 4.
    """
    assert micro_batch_bound(np.array([7, 7, 7, 4, 4, 4]), 10) == 5


def test_bound_on_ranks_counts_what_other_ranks_have_no_room_for() -> None:
    assert rank_bound(np.array([6, 2]), np.array([6, 2]), 8, num_ranks=2, num_slots=1) == 1.5
    full = np.array([8, 4, 4])
    assert rank_bound(full, full**2, 8, num_ranks=2, num_slots=1) == 64 * 2 / 96
    assert rank_bound(np.array([5]), np.array([0]), 8, num_ranks=2, num_slots=1) == 1.0


def test_bound_on_ranks_counts_what_several_of_them_cannot_hand_on() -> None:
    """Two 4s and fifteen 1s in squares, under 4 on 3 ranks with 2 micro-batches each.

    One rank with a 4 runs at least 23 - 16 - 4 = 3 tokens more, 19. The two ranks with a 4 run at
    least 23 - 8 - 8 = 7 more, together 39, and one of them 19.5 or more, of a mean of 47 / 3.
    """
    lengths = np.array([4, 4] + [1] * 15)
    assert rank_bound(lengths, lengths**2, 4, num_ranks=3, num_slots=2) == 19.5 * 3 / 47


def test_bounds_of_one_long_sample_among_short_ones() -> None:
    """Cap 8, 2 ranks, 2 slots, squares: 8 (64) and eight 2s (4 each).

    The top bin is the 8; others hold at most four 2s.

    Targets: the first slot can hold 64 + 16, so the other two bins share what is left of 96: 8
    each.
    """
    step = problem([8] + [2] * 8, cap=8, ranks=2, slots=2)
    bounds = step.bounds()
    assert bounds.ceiling.tolist() == [64, 16, 16, 16]
    assert bounds.floor.tolist() == [64, 4]
    assert bounds.knapsack.tolist() == [80, 96]
    assert slot_bound(bounds) == (64 + 8) * 2 / 96
    assert slot_targets(bounds) == [64, 8]


def test_the_slot_bound_counts_how_long_ranks_idle_beside_the_long_sample() -> None:
    """As above: beside the 8 (64) the other rank has at most 16, so it idles there for 48.

    With ranks of up to 1.25 * 48 = 60 all of 96 is done when 60 + (S - 48) >= 96, so from S = 84
    on: 83 is the bound, above the 72 that holds for any ranks. With ranks of up to 72 that is 71,
    and the bound for any ranks is the higher one. A head start of 48 - (83 - 60) = 25 makes the
    other rank end where S = 83 says.
    """
    bounds = problem([8] + [2] * 8, cap=8, ranks=2, slots=2).bounds()
    assert slot_bound(bounds, rank_limit=1.25) == 83 * 2 / 96
    assert slot_bound(bounds, rank_limit=1.5) == slot_bound(bounds) == 72 * 2 / 96
    assert head_starts(bounds, 0.25) == [0, 25]


def test_useful_slack_is_the_least_that_lowers_the_slots() -> None:
    """Cap 8 on 2 ranks, squares: an 8 (64) and thirty-eight 4s (16 each), 672 in all, 336 per rank.

    Beside the 8 the other rank has at most 32, so for any ranks slots end at 64 + (672 - 96) / 2 =
    352 or later. Ranks of up to h are done from S = 672 - h + 32 on, so that less, S - 1, comes
    down to 352 with h = 351, the ceiling of 336 * 1.0417 and not of 336 * 1.0416.
    """
    bounds = problem([8] + [4] * 38, cap=8, ranks=2, slots=10).bounds()
    assert slot_bound(bounds) == 352 / 336
    assert slot_bound(bounds, rank_limit=1.0) == (672 - 336 + 32 - 1) / 336
    assert useful_slack(bounds) == 0.0417


def test_slack_is_useful_only_where_a_long_sample_makes_ranks_wait() -> None:
    assert useful_slack(problem([4] * 8, cap=8, ranks=2, slots=2).bounds()) == 0.0
    long = problem(
        lognormal(4096, 32768, 0, mean=8.0), cap=32768, ranks=64, slots=9, linear=24576
    ).bounds()
    slack = useful_slack(long)
    assert 0.0 < slack <= MOST_SLACK
    assert head_starts(long, 0.0) == [0] * 64
    starts = head_starts(long, slack)
    assert starts == sorted(starts)
    assert starts[-1] > 0


def test_pipeline_order_puts_the_cheapest_at_both_ends() -> None:
    assert pipeline_order(5).tolist() == [3, 1, 0, 2, 4]
    assert pipeline_order(1).tolist() == [0]


def test_slots_are_arranged_by_cost_alike_on_every_rank() -> None:
    """Costs 1, 3, 2 and 5, 4, 6: sorted descending, then places [1, 0, 2]."""
    arranged = arrange_slots(np.arange(6), np.array([1, 3, 2, 5, 4, 6]), num_ranks=2, num_slots=3)
    assert bin_sums(np.array([1, 3, 2, 5, 4, 6]), arranged, 6).reshape(2, 3).tolist() == [
        [2, 3, 1],
        [5, 6, 4],
    ]


def test_an_empty_bin_takes_the_cheapest_sample_of_its_own_rank() -> None:
    costs = np.array([9, 1, 5, 2])
    assert fill_empty_bins(np.array([0, 0, 2, 2]), costs, num_ranks=2, num_bins=4).tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_an_empty_bin_takes_from_the_costliest_rank_if_its_own_has_none_to_spare() -> None:
    costs = np.array([9, 1, 5])
    assert fill_empty_bins(np.array([0, 0, 1]), costs, num_ranks=3, num_bins=3).tolist() == [
        0,
        2,
        1,
    ]
    assert fill_empty_bins(np.array([0, 1]), costs[:2], num_ranks=3, num_bins=3).tolist() == [0, 1]


def test_two_level_lpt_by_hand() -> None:
    """6 to rank 0, 5 to rank 1, 4 to its other bin (load 9), 3 to that of rank 0 (load 9).

    Then 2 to rank 0, the first of equals, and 2 to rank 1.
    """
    state = LptState.empty(num_ranks=2, num_slots=2, cap=6, targets=[6, 6])
    assert two_level_lpt([6, 5, 4, 3, 2, 2], [6, 5, 4, 3, 2, 2], state, 6) == [0, 2, 3, 1, 1, 3]


def test_two_level_lpt_says_when_it_is_stuck() -> None:
    assert (
        two_level_lpt(
            [3, 3, 2, 2, 2],
            [3, 3, 2, 2, 2],
            LptState.empty(num_ranks=1, num_slots=2, cap=6, targets=[6, 6]),
            6,
        )
        is None
    )


def test_two_level_lpt_leaves_an_oversized_sample_alone() -> None:
    state = LptState.empty(num_ranks=1, num_slots=2, cap=6, targets=[9, 9])
    assert two_level_lpt([9, 3, 3], [9, 3, 3], state, 6) == [0, 1, 1]


def test_a_tight_packing_that_lpt_misses_is_found_by_composites() -> None:
    """3 + 3 and 2 + 2 + 2 under 6: LPT parts the 3s, best-fit does not."""
    step = problem([3, 3, 2, 2, 2], cap=6, ranks=1, slots=2)
    assert pack_by_cost(step, step.bounds()) is None
    bins = pack_long_first(step, num_long=5)
    assert bins is not None
    assert bin_sums(step.lengths, bins, 2).tolist() == [6, 6]


def test_composites_say_when_nothing_fits() -> None:
    assert pack_long_first(problem([4, 4, 4], cap=6, ranks=1, slots=2), num_long=3) is None


def test_composites_share_with_bins_that_would_stay_empty() -> None:
    """Nine samples of a third of the cap fill 3 of 4 bins; all four share them."""
    bins = pack_long_first(problem([4] * 9, cap=12, ranks=2, slots=2), num_long=9)
    assert bins is not None
    assert sorted(np.bincount(bins, minlength=4).tolist()) == [2, 2, 2, 3]


def test_levelling_swaps_within_the_cap() -> None:
    """{9, 2} and {6, 4} under 12 in squares: 85 and 52.

    Swapping 9 and 6 gives 40 and 97, no better; 2 and 4 only widens it.
    """
    lengths = np.array([9, 6, 4, 2])
    before = np.array([0, 1, 1, 0])
    assert (
        level_bins(before, lengths, lengths**2, cap=12, num_bins=2, level=0).tolist()
        == before.tolist()
    )


def test_levelling_swaps_the_two_that_close_the_gap() -> None:
    """{6, 5} and {2, 1}, tokens as cost: 6 against 2, or 5 against 1, gives 7 and 7."""
    lengths = np.array([6, 5, 2, 1])
    levelled = level_bins(np.array([0, 0, 1, 1]), lengths, lengths, cap=11, num_bins=2, level=7)
    assert bin_sums(lengths, levelled, 2).tolist() == [7, 7]


def test_ranks_exchange_the_two_samples_that_close_the_gap() -> None:
    """{6}, {5} against {2}, {1}, tokens as cost: 6 for 2 gives 7 and 7."""
    lengths = np.array([6, 5, 2, 1])
    levelled = level_ranks(
        np.array([0, 1, 2, 3]), lengths, lengths, cap=6, num_ranks=2, num_slots=2
    )
    assert bin_sums(lengths, levelled, 4).reshape(2, 2).tolist() == [[2, 5], [6, 1]]


def test_a_sample_moves_where_none_need_come_back() -> None:
    """{4, 3} and {1} under 7: 3 moves; 4 for 1 would leave the same 4 and 4, later in the table."""
    lengths = np.array([4, 3, 1])
    levelled = level_ranks(np.array([0, 0, 1]), lengths, lengths, cap=7, num_ranks=2, num_slots=1)
    assert sorted(bin_sums(lengths, levelled, 2).tolist()) == [4, 4]


def test_a_rank_that_can_take_nothing_makes_way_for_the_next_cheapest() -> None:
    """Squares under 7: {4, 3} costs 25, {1 x 6} costs 6 and has room for one token, {3} costs 9.

    The cheapest takes no 4 and no 3 for a 1; the next one takes the 4 for its 3: 18, 6 and 16.
    """
    lengths = np.array([4, 3, 3, 1, 1, 1, 1, 1, 1])
    bins = np.array([0, 0, 2, 1, 1, 1, 1, 1, 1])
    levelled = level_ranks(bins, lengths, lengths**2, cap=7, num_ranks=3, num_slots=1)
    assert bin_sums(lengths**2, levelled, 3).tolist() == [18, 6, 16]


def test_only_a_spread_of_the_samples_of_a_large_rank_is_compared() -> None:
    """3,000 samples on one of two ranks, 1,000 on the other: 512 of each are looked at."""
    lengths = np.sort(np.random.default_rng(0).integers(1, 50, 4_000))[::-1].copy()
    bins = (np.arange(4_000) % 4 == 0).astype(np.int64)
    costs = lengths**2
    levelled = level_ranks(bins, lengths, costs, cap=10**6, num_ranks=2, num_slots=1)
    before, after = (rank_imbalance(bin_sums(costs, x, 2).reshape(2, 1)) for x in (bins, levelled))
    assert before > 1.4
    assert after < before


def test_squares_first_levels_nearly_full_micro_batches() -> None:
    """Fill 0.995: by cost the ranks end 3 % apart, squares first brings them within 0.1 %."""
    step = problem(lognormal(4096, 32768, 6), cap=32768, ranks=64, slots=6, linear=24576)
    assert step.fill > 0.99
    by_cost = pack_by_cost(step, step.bounds())
    squares = [pack_squares_first(step, short_share=share) for share in (0.1, 0.05)]
    assert by_cost is not None
    assert step.candidate(by_cost, "").rank > 1.02
    assert min(step.candidate(bins, "").rank for bins in squares if bins is not None) < 1.001


def test_squares_first_has_nothing_to_do_for_a_linear_cost() -> None:
    step = problem([4, 3, 2, 1], cap=8, ranks=2, slots=1)
    linear = StepProblem(
        lengths=step.lengths,
        costs=3 * step.lengths,
        cap=8,
        num_ranks=2,
        num_slots=1,
        packings=step.packings,
    )
    assert pack_squares_first(linear, short_share=0.2) is None


def test_topping_up_nothing_changes_nothing() -> None:
    step = problem([4, 3], cap=8, ranks=2, slots=1)
    placed = np.array([0, 1])
    assert top_up(step, placed) is placed


def test_exact_search_beats_a_bad_start() -> None:
    """Squares 36, 25, 16, 9, 4, 1 on two ranks: 45 and 46 is best."""
    step = problem([6, 5, 4, 3, 2, 1], cap=7, ranks=2, slots=2)
    found = search_exactly(step, np.array([0, 0, 1, 1, 2, 3]))
    assert found is not None
    assert sorted(bin_sums(step.costs, found, 4).reshape(2, 2).sum(axis=1).tolist()) == [45, 46]
    assert search_exactly(step, found) is None


def test_imbalances_by_hand() -> None:
    costs = np.array([[3, 1], [1, 3]])
    assert (rank_imbalance(costs), slot_imbalance(costs)) == (1.0, 1.5)
    assert (rank_imbalance(costs * 0), slot_imbalance(costs * 0)) == (1.0, 1.0)


def test_splitting_by_hand() -> None:
    """Bin {5, 4, 1} (10) splits into {5} and {4, 1}, then {4, 1} into {4} and {1}; {7} cannot."""
    lengths = [5, 4, 1, 7]
    assert split_bins([[0, 1, 2], [3]], lengths, 3) == [[0], [3], [1, 2]]
    assert split_bins([[0, 1, 2], [3]], lengths, 9) == [[0], [3], [1], [2]]
    assert (round_up(5, 4), round_up(0, 4), round_up(8, 4)) == (8, 4, 8)


@pytest.mark.parametrize("cost", [rs.QuadraticCost(), rs.TokenCost(), rs.QuadraticCost(linear=0)])
def test_cost_bounds_have_the_shapes_they_state(cost: rs.CostModel) -> None:
    lengths = np.sort(np.array(lognormal(200, 16384, 0), dtype=np.int64))[::-1].copy()
    bounds = cost_bounds(lengths, np.asarray(cost(lengths)), 16384, num_ranks=4, num_slots=12)
    assert (bounds.ceiling.shape, bounds.floor.shape, bounds.knapsack.shape) == (
        (48,),
        (12,),
        (12,),
    )
    assert np.all(np.diff(bounds.ceiling) <= 0)
    assert np.all(np.diff(bounds.floor) <= 0)
    assert bounds.knapsack[-1] >= bounds.total
