"""Packers and number partitioning on small inputs worked out by hand."""

from collections.abc import Callable

import pytest

import rl_schedule as rs

Packer = Callable[[list[int], int], list[list[int]]]
PACKERS = [rs.first_fit, rs.first_fit_decreasing, rs.best_fit_decreasing]


def test_first_fit_by_hand() -> None:
    assert rs.first_fit([5, 4, 3, 2, 6], 8) == [[0, 2], [1, 3], [4]]


def test_first_fit_decreasing_by_hand() -> None:
    """Order 6, 5, 4, 3, 2: 6 opens 0; 5 opens 1; 4 opens 2; 3 joins 1; 2 joins 0."""
    assert rs.first_fit_decreasing([5, 4, 3, 2, 6], 8) == [[4, 3], [0, 2], [1]]


def test_best_fit_takes_the_tightest_bin() -> None:
    """Order 6, 5, 3, 2, 2 under 9: 3 fits 6 exactly, so 5 keeps its room for both 2s."""
    assert rs.best_fit_decreasing([5, 6, 2, 3, 2], 9) == [[1, 3], [0, 2, 4]]


def test_best_fit_differs_from_first_fit() -> None:
    """Under 10: 8 and 7 open bins with room 2 and 3; 3 fits only the second, 2 the first."""
    lengths = [7, 8, 2, 3]
    assert rs.first_fit_decreasing(lengths, 10) == [[1, 2], [0, 3]]
    assert rs.best_fit_decreasing([5, 6, 4], 10) == [[1, 2], [0]]


@pytest.mark.parametrize("packer", PACKERS)
def test_no_samples_need_no_bins(packer: Packer) -> None:
    assert packer([], 8) == []


@pytest.mark.parametrize("packer", PACKERS)
def test_an_oversized_sample_is_alone(packer: Packer) -> None:
    bins = packer([3, 12, 3], 8)
    assert [1] in bins
    assert sorted(map(sorted, bins)) == [[0, 2], [1]]


@pytest.mark.parametrize("packer", PACKERS)
def test_every_packer_refuses_a_zero_length(packer: Packer) -> None:
    with pytest.raises(rs.ScheduleError, match="sample 1 has 0"):
        packer([3, 0], 8)


@pytest.mark.parametrize("packer", PACKERS)
def test_every_packer_refuses_a_zero_cap(packer: Packer) -> None:
    with pytest.raises(rs.ScheduleError, match="cap"):
        packer([3], 0)


def test_karmarkar_karp_by_hand() -> None:
    """8, 7, 6, 5, 4: differences 8-7=1, 6-5=1, 4-1=3, 3-1=2: sums 16 and 14, as published."""
    sets = rs.karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in members) for members in sets) == [14, 16]


def test_karmarkar_karp_equal_size_by_hand() -> None:
    """Pairs (9, 8) and (2, 1): the heavier of one meets the lighter of the other, 10 and 10."""
    sets = rs.karmarkar_karp([9, 8, 2, 1], 2, equal_size=True)
    assert sorted(map(sorted, sets)) == [[0, 3], [1, 2]]


def test_karmarkar_karp_edges() -> None:
    assert rs.karmarkar_karp([], 3) == [[], [], []]
    assert rs.karmarkar_karp([4.5], 2) == [[0], []]
    assert rs.karmarkar_karp([1, 2], 1) == [[0, 1]]


@pytest.mark.parametrize(
    ("weights", "k", "equal", "words"),
    [
        ([1, 2, 3], 2, True, "multiple of k=2"),
        ([-1], 1, False, ">= 0"),
        ([float("inf")], 1, False, "finite"),
        ([1], 0, False, "k"),
    ],
)
def test_karmarkar_karp_refuses(weights: list[float], k: int, equal: bool, words: str) -> None:
    with pytest.raises(rs.ScheduleError, match=words):
        rs.karmarkar_karp(weights, k, equal)
