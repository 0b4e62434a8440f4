"""Laws of the packers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_schedule as rs
from rl_schedule.balancing.bounds import micro_batch_bound

LENGTHS = st.lists(st.integers(1, 30), max_size=60)
CAP = st.integers(1, 40)
PACKERS = [rs.first_fit, rs.first_fit_decreasing, rs.best_fit_decreasing]


def first_fit_reference(lengths: list[int], cap: int) -> list[list[int]]:
    """In arrival order, each sample into the first bin with room: the definition, by trying all."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for position, length in enumerate(lengths):
        for index, room in enumerate(rooms):
            if length <= room:
                bins[index].append(position)
                rooms[index] -= length
                break
        else:
            bins.append([position])
            rooms.append(cap - length)
    return bins


@given(LENGTHS, CAP)
def test_first_fit_is_the_naive_one_bin_for_bin(lengths: list[int], cap: int) -> None:
    assert rs.first_fit(lengths, cap) == first_fit_reference(lengths, cap)


@pytest.mark.parametrize("packer", PACKERS)
@given(lengths=LENGTHS, cap=CAP)
def test_packers_place_each_once_under_the_cap(packer: type, lengths: list[int], cap: int) -> None:
    bins = packer(lengths, cap)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= cap or len(members) == 1 for members in bins)
    assert len(bins) >= micro_batch_bound(np.array(lengths, dtype=np.int64), cap)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), CAP)
def test_plain_mode_before_alignment_is_first_fit(lengths: list[int], cap: int) -> None:
    plan = rs.build_dp_schedule(
        total_lengths=lengths,
        rollout_ids=range(len(lengths)),
        global_batch_size=len(lengths),
        dp_size=1,
        max_tokens_per_gpu=cap,
        balance="none",
    )
    bins = [plan.micro_batch_samples(0, k).tolist() for k in range(plan.micro_batches_per_rank)]
    assert bins == first_fit_reference(lengths, cap)
