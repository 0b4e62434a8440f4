"""Every promise, broken by hand, is found and named with its samples."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs

REQUEST: dict[str, Any] = {
    "total_lengths": [4, 3, 2, 5, 1, 6],
    "rollout_ids": [0, 1, 2, 3, 3, 4],
    "global_batch_size": 2,
    "dp_size": 2,
    "max_tokens_per_gpu": 6,
    "balance": "none",
}
PLAN = rs.build_dp_schedule(**REQUEST)
"""Step 0: {0} and {1}; step 1: {2, 4} and {3}; rollout 4 (sample 5) is dropped."""


def problems(change: dict[str, Any], **settings: Any) -> list[rs.Problem]:
    return rs.check_plan(
        dataclasses.replace(PLAN, **change), rs.ScheduleRequest(**{**REQUEST, **settings})
    )


def test_the_plan_before_it_is_broken() -> None:
    assert PLAN.sample_positions.tolist() == [0, 2, 4, 1, 3]
    assert PLAN.micro_batch_offsets.tolist() == [0, 1, 3, 4, 5]
    assert problems({}) == []


@pytest.mark.parametrize(
    ("promise", "change", "settings", "samples"),
    [
        ("P1", {"dp_size": 3}, {}, ()),
        ("P1", {"micro_batch_offsets": np.array([0, 1, 3, 5])}, {}, ()),
        ("P1", {"global_batch_sizes": (2,)}, {}, ()),
        ("P2", {}, {"vpp_size": 2, "microbatch_group_size_per_vp_stage": 2}, ()),
        ("P3", {"micro_batch_offsets": np.array([0, 3, 1, 4, 5])}, {}, ()),
        ("P3", {"sample_positions": np.array([0, 2, 99, 1, 3])}, {}, (99,)),
        ("P3", {"sample_positions": np.array([0, 2, 2, 1, 3])}, {}, (2,)),
        ("P3", {"sample_positions": np.array([0, 2, 2, 1, 3])}, {}, (4,)),
        ("P3", {"dropped_samples": ()}, {}, (5,)),
        ("P3", {"dropped_samples": (1, 5)}, {}, (1,)),
        ("P3", {"dropped_rollouts": ()}, {}, ()),
        ("P5", {"sample_positions": np.array([4, 2, 0, 1, 3])}, {}, (4,)),
        ("P5", {"global_batch_sizes": (3, 1)}, {}, ()),
        ("P6", {}, {"max_tokens_per_gpu": 2}, (2, 4)),
        ("P6", {}, {"max_tokens_per_gpu": None, "micro_batch_size": 1}, (2, 4)),
        ("P6", {"oversized_samples": (1,)}, {"max_tokens_per_gpu": 8}, (1,)),
        ("P9", {}, {"max_tokens_per_gpu": 6, "pad_to_multiple": 4}, (2, 4)),
        ("P7", {"filler_micro_batches": ((0, 0),)}, {"max_tokens_per_gpu": 8}, ()),
        ("P7", {"micro_batch_offsets": np.array([0, 0, 3, 4, 5])}, {}, ()),
    ],
)
def test_a_broken_promise_is_found(
    promise: str, change: dict[str, Any], settings: dict[str, Any], samples: tuple[int, ...]
) -> None:
    found = [problem for problem in problems(change, **settings) if problem.promise == promise]
    assert found
    assert any(problem.samples == samples for problem in found), found
    assert all(str(problem).startswith(f"{promise}: ") for problem in found)


def test_a_digest_that_is_not_the_arrays_is_found() -> None:
    forged = dataclasses.replace(PLAN)
    object.__setattr__(forged, "digest", "0" * 64)
    assert [
        p.promise
        for p in rs.check_plan(forged, rs.ScheduleRequest(**{**REQUEST, "max_tokens_per_gpu": 6}))
    ] == ["P8"]


def test_a_placed_sample_that_should_have_been_dropped_is_found() -> None:
    request = {**REQUEST, "max_tokens_per_gpu": 4, "global_batch_size": None, "splitter": "all"}
    kept = rs.build_dp_schedule(**request)
    found = rs.check_plan(kept, rs.ScheduleRequest(**{**request, "on_oversized": "drop"}))
    assert [(p.promise, p.samples) for p in found] == [("P6", (3, 5))]


def test_a_plan_worse_than_strided_bins_is_found() -> None:
    """Six samples alone in their micro-batches: 6, 5, 4 on one rank and 3, 2, 1 on the other."""
    request: dict[str, Any] = {
        "total_lengths": [6, 5, 4, 3, 2, 1],
        "rollout_ids": range(6),
        "global_batch_size": 6,
        "dp_size": 2,
        "max_tokens_per_gpu": 6,
        "cost": rs.TokenCost(),
    }
    good = rs.build_dp_schedule(**{**request, "balance": "none"})
    bad = dataclasses.replace(
        good,
        sample_positions=np.arange(6),
        micro_batch_offsets=np.arange(7),
        num_microbatches=(3,),
    )
    found = rs.check_plan(bad, rs.ScheduleRequest(**request))
    assert [(p.promise, p.step) for p in found] == [("P10", 0)]
    assert rs.check_plan(bad, rs.ScheduleRequest(**{**request, "rank_slack": 0.5})) == []


def test_a_long_list_of_samples_is_shortened_in_the_message_and_whole_in_the_record() -> None:
    request: dict[str, Any] = {
        "total_lengths": [1] * 20,
        "rollout_ids": range(20),
        "global_batch_size": 20,
        "dp_size": 1,
    }
    plan = rs.build_dp_schedule(**request, max_tokens_per_gpu=20)
    (problem,) = rs.check_plan(plan, rs.ScheduleRequest(**request, max_tokens_per_gpu=10))
    assert problem.samples == tuple(range(20))
    assert (problem.rank, problem.step, problem.micro_batch) == (0, 0, 0)
