"""Laws of swaps between hands."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_schedule.packing import bin_sums, level_hands


@st.composite
def dealt(draw: st.DrawFn) -> tuple[list[int], list[int], int, list[int]]:
    """Costs, hands, their number, and sizes."""
    count, hands = draw(st.integers(1, 40)), draw(st.integers(1, 6))

    def column(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    return column(0, 1000), column(0, hands - 1), hands, column(1, 3)


@given(dealt())
def test_hands_keep_their_sizes_and_the_costliest_gets_no_costlier(
    case: tuple[list[int], list[int], int, list[int]],
) -> None:
    costs, hand_of, sizes = (np.array(column, dtype=np.int64) for column in (*case[:2], case[3]))
    levelled = level_hands(costs, hand_of, case[2], sizes)
    for size in (1, 2, 3):
        alike = sizes == size
        before, after = (
            np.bincount(hands[alike], minlength=case[2]) for hands in (hand_of, levelled)
        )
        assert before.tolist() == after.tolist()
    assert bin_sums(costs, levelled, case[2]).max() <= bin_sums(costs, hand_of, case[2]).max()


def test_a_swap_takes_half_of_the_gap() -> None:
    """{10, 7} and {1, 4}: 17 against 5; 10 for 4 or 7 for 1 gives 11 each."""
    costs, hands = np.array([10, 7, 1, 4]), np.array([0, 0, 1, 1])
    levelled = level_hands(costs, hands, 2, np.ones(4, dtype=np.int64))
    assert bin_sums(costs, levelled, 2).tolist() == [11, 11]


def test_items_of_another_size_are_not_swapped() -> None:
    costs, hands = np.array([10, 7, 1, 4]), np.array([0, 0, 1, 1])
    assert level_hands(costs, hands, 2, np.array([1, 1, 2, 2])).tolist() == [0, 0, 1, 1]
