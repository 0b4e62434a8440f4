"""`check_prefix_plan` finds each broken promise, whoever broke it."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs

REQUEST = rs.PrefixRequest(
    schedule=rs.ScheduleRequest(
        total_lengths=[12, 13, 14, 12, 13, 14],
        rollout_ids=[0, 1, 2, 3, 4, 5],
        global_batch_size=6,
        dp_size=2,
        max_tokens_per_gpu=20,
    ),
    prefix_ids=[0, 0, 0, 1, 1, 1],
    prefix_lengths=[10] * 6,
)
PLAN = rs.plan_with_prefixes(REQUEST)


def changed(**arrays: Any) -> rs.PrefixPlan:
    values = {entry.name: getattr(PLAN, entry.name) for entry in fields(PLAN) if entry.init}
    return rs.PrefixPlan(**values | arrays)


def promises(plan: rs.PrefixPlan, request: rs.PrefixRequest = REQUEST) -> set[str]:
    return {problem.promise for problem in rs.check_prefix_plan(plan, request)}


def test_the_plan_by_hand() -> None:
    """Two groups of 10 + 2 + 3 + 4 = 19 tokens: one micro-batch on each rank."""
    assert PLAN.sample_positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert PLAN.micro_batch_offsets.tolist() == [0, 1, 2]
    assert promises(PLAN) == set()


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        ({"dp_size": 1, "num_microbatches": (2,)}, {"P1"}),
        ({"micro_batch_offsets": [0, 2]}, {"P1"}),
        ({"micro_batch_offsets": [0, 2, 1]}, {"P1"}),
        ({"micro_batch_offsets": []}, {"P1"}),
        ({"tree_sample_offsets": [0, 0, 6]}, {"T1"}),
        ({"tree_sample_offsets": [0, 3]}, {"P1"}),
        ({"response_lengths": [2]}, {"T2"}),
        ({"tree_prefix_lengths": [10]}, {"T2"}),
        ({"global_batch_sizes": (3, 3)}, {"P1"}),
        ({"sample_positions": [0, 1, 2, 3, 4, 6]}, {"P3"}),
        ({"sample_positions": [0, 1, -1, 3, 4, 5]}, {"P3"}),
        ({"sample_positions": [0, 1, 2, 3, 4, 4]}, {"P3", "P5", "T2"}),
        ({"dropped_samples": (4,)}, {"P3", "P5"}),
        ({"dropped_samples": (9,)}, {"P3"}),
        ({"dropped_rollouts": (4,)}, {"P3"}),
        ({"global_batch_sizes": (5,)}, {"P5"}),
        ({"oversized_samples": (2,)}, {"P6"}),
        ({"filler_micro_batches": ((1, 0),)}, {"P7"}),
        ({"tree_prefix_ids": [1, 0]}, {"T1"}),
        ({"tree_prefix_lengths": [10, 9]}, {"T2"}),
        ({"response_lengths": [2, 3, 4, 2, 3, 5]}, {"T2"}),
        # Both groups on one rank: 38 tokens under 20, and a filler beside two trees.
        ({"micro_batch_offsets": [0, 2, 2]}, {"P6", "P7"}),
        # The first group in two trees of one micro-batch: its prefix twice, 29 tokens.
        (
            {
                "tree_sample_offsets": [0, 1, 3, 6],
                "tree_prefix_ids": [0, 0, 1],
                "tree_prefix_lengths": [10, 10, 10],
                "micro_batch_offsets": [0, 2, 3],
            },
            {"P6", "T1"},
        ),
    ],
)
def test_a_change_breaks_a_promise(arrays: dict[str, Any], found: set[str]) -> None:
    given = {
        name: np.array(value, dtype=np.int64) if isinstance(value, list) else value
        for name, value in arrays.items()
    }
    assert promises(changed(**given)) >= found


def test_a_digest_of_other_arrays_is_found() -> None:
    plan = changed()
    object.__setattr__(plan, "digest", "0" * 64)
    assert promises(plan) == {"P8"}


def with_schedule(**settings: Any) -> rs.PrefixRequest:
    given: dict[str, Any] = {
        "total_lengths": REQUEST.schedule.total_lengths,
        "rollout_ids": REQUEST.schedule.rollout_ids,
        "global_batch_size": 6,
        "dp_size": 2,
        "max_tokens_per_gpu": 20,
    }
    return rs.PrefixRequest(
        schedule=rs.ScheduleRequest(**given | settings),
        prefix_ids=REQUEST.prefix_ids,
        prefix_lengths=REQUEST.prefix_lengths,
    )


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"dp_size": 1}, {"P1"}),
        ({"vpp_size": 2, "microbatch_group_size_per_vp_stage": 2}, {"P2"}),
        ({"max_tokens_per_gpu": 18}, {"P6"}),
        ({"max_tokens_per_gpu": 13, "on_oversized": "drop"}, {"P6"}),
        ({"rollout_ids": [0, 1, 2, 3, 4, 4]}, {"P5"}),
    ],
)
def test_a_plan_of_another_request_is_found(settings: dict[str, Any], found: set[str]) -> None:
    assert promises(PLAN, with_schedule(**settings)) >= found


def test_a_rollout_in_two_steps_is_found() -> None:
    halves = with_schedule(global_batch_size=3, rollout_ids=[0, 0, 0, 1, 1, 0])
    plan = changed(
        micro_batch_offsets=np.array([0, 1, 1, 1, 2]),
        num_microbatches=(1, 1),
        global_batch_sizes=(1, 2),
        filler_micro_batches=((0, 1), (1, 0)),
    )
    problems = rs.check_prefix_plan(plan, halves)
    (torn,) = [problem for problem in problems if "span" in problem.message]
    assert torn.promise == "P5"
    assert torn.samples == (0, 1, 2, 5)


def test_a_filler_that_a_copy_could_fill_is_found() -> None:
    """Group 1 whole on rank 1 beside an empty micro-batch, while rank 0 has more to do anyway."""
    request = rs.PrefixRequest(
        schedule=rs.ScheduleRequest(
            total_lengths=[50, 51, 5, 6],
            rollout_ids=range(4),
            global_batch_size=4,
            dp_size=2,
            max_tokens_per_gpu=60,
        ),
        prefix_ids=[0, 1, 2, 2],
        prefix_lengths=[10, 10, 2, 2],
    )
    plan = rs.PrefixPlan(
        dp_size=2,
        sample_positions=np.arange(4),
        response_lengths=np.array([40, 41, 3, 4]),
        tree_sample_offsets=np.array([0, 1, 2, 4]),
        tree_prefix_ids=np.array([0, 1, 2]),
        tree_prefix_lengths=np.array([10, 10, 2]),
        micro_batch_offsets=np.array([0, 1, 2, 3, 3]),
        num_microbatches=(2,),
        global_batch_sizes=(4,),
        dropped_samples=(),
        dropped_rollouts=(),
        oversized_samples=(),
        filler_micro_batches=((1, 1),),
        stats=(),
    )
    (problem,) = rs.check_prefix_plan(plan, request)
    assert (problem.promise, problem.rank, problem.step) == ("P7", 1, 0)
    assert "could fill" in str(problem)
