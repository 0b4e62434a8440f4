"""The plan record: views, equality, digest, pickling."""

import dataclasses
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs

PLAN = rs.build_dp_schedule(
    total_lengths=[4, 3, 2, 5, 1],
    rollout_ids=[0, 1, 2, 3, 3],
    global_batch_size=2,
    dp_size=2,
    max_tokens_per_gpu=6,
    balance="none",
)


def test_the_csr_arrays_and_the_views_say_the_same() -> None:
    assert PLAN.num_microbatches == (1, 1)
    assert PLAN.global_batch_sizes == (2, 2)
    assert PLAN.sample_positions.tolist() == [0, 2, 4, 1, 3]
    assert PLAN.micro_batch_offsets.tolist() == [0, 1, 3, 4, 5]
    assert [part.tolist() for part in PLAN.partitions] == [[0, 2, 4], [1, 3]]
    assert [[indices.tolist() for indices in rank] for rank in PLAN.micro_batch_indices] == [
        [[0], [1, 2]],
        [[0], [1]],
    ]
    assert PLAN.partitions[0].dtype == np.int64


def test_a_rank_view_is_the_plan_as_one_rank_sees_it() -> None:
    view = PLAN.rank_view(1)
    assert (view.rank, view.num_microbatches, view.global_batch_sizes, view.digest) == (
        1,
        (1, 1),
        (2, 2),
        PLAN.digest,
    )
    assert view.partition.tolist() == [1, 3]
    assert [indices.tolist() for indices in view.micro_batch_indices] == [[0], [1]]


def test_placement_says_where_each_sample_runs() -> None:
    placement = PLAN.placement()
    assert placement.data_parallel_rank.tolist() == [0, 1, 0, 1, 0]
    assert placement.micro_batch.tolist() == [0, 0, 0, 0, 0]
    assert placement.step.tolist() == [0, 0, 1, 1, 1]


def test_a_dropped_sample_is_placed_nowhere() -> None:
    plan = rs.build_dp_schedule(
        total_lengths=[4, 3, 2],
        rollout_ids=[0, 1, 2],
        global_batch_size=2,
        dp_size=1,
        max_tokens_per_gpu=6,
    )
    assert plan.placement().step.tolist() == [0, 0, -1]
    assert plan.placement().data_parallel_rank.tolist() == [0, 0, -1]
    empty = rs.build_dp_schedule(
        total_lengths=[9],
        rollout_ids=[0],
        global_batch_size=1,
        dp_size=1,
        max_tokens_per_gpu=6,
        on_oversized="drop",
        on_trailing="partial_step",
    )
    assert empty.placement().micro_batch.tolist() == [-1]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(rs.ScheduleError, match=f"rank {rank} does not exist in a plan for 2"):
        PLAN.rank_view(rank)


def test_plans_and_views_survive_pickling() -> None:
    again = pickle.loads(pickle.dumps(PLAN))
    assert again == PLAN
    assert again.stats == PLAN.stats
    view = pickle.loads(pickle.dumps(PLAN.rank_view(0)))
    assert view.partition.tolist() == [0, 2, 4]
    assert [indices.tolist() for indices in view.micro_batch_indices] == [[0], [1, 2]]


def test_a_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.dp_size = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        PLAN.sample_positions[0] = 1


@pytest.mark.parametrize(
    "change",
    [
        {"sample_positions": np.array([2, 0, 4, 1, 3])},
        {"micro_batch_offsets": np.array([0, 2, 3, 4, 5])},
        {"global_batch_sizes": (3, 1)},
        {"dropped_samples": (9,)},
        {"dropped_rollouts": (9,)},
        {"oversized_samples": (1,)},
        {"filler_micro_batches": ((0, 1),)},
    ],
)
def test_the_digest_covers_every_array(change: dict[str, Any]) -> None:
    other = dataclasses.replace(PLAN, **change)
    assert other.digest != PLAN.digest
    assert other != PLAN


def test_stats_and_settings_are_not_in_the_digest() -> None:
    other = dataclasses.replace(
        PLAN,
        stats=dataclasses.replace(PLAN.stats, wall_seconds=9.0),
        settings={**PLAN.settings, "cp_size": 9},
    )
    assert other == PLAN
    assert hash(other) == hash(PLAN)


def test_a_plan_equals_nothing_else() -> None:
    assert PLAN != "plan"


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_the_digest_is_the_same_in_every_process(seed: str) -> None:
    code = (
        "import numpy as np, rl_schedule as rs\nlengths = np.random.default_rng(3).integers(1,"
        " 3000, 700)\nprint(rs.build_dp_schedule(total_lengths=lengths, rollout_ids=range(700),"
        " global_batch_size=100, dp_size=4, max_tokens_per_gpu=4096,"
        " cost=rs.TransformerCost(token_flops=12345, pair_flops=7)).digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment,
    )
    lengths = np.random.default_rng(3).integers(1, 3000, 700)
    here = rs.build_dp_schedule(
        total_lengths=lengths,
        rollout_ids=range(700),
        global_batch_size=100,
        dp_size=4,
        max_tokens_per_gpu=4096,
        cost=rs.TransformerCost(token_flops=12345, pair_flops=7),
    )
    assert result.stdout.strip() == here.digest


def test_a_rank_runs_its_micro_batches_step_by_step() -> None:
    """The plan above: rank 0 has {0} and {2, 4}, rank 1 {1} and {3}."""
    assert [
        [[batch.tolist() for batch in step] for step in PLAN.rank_view(rank).steps()]
        for rank in range(2)
    ] == [[[PLAN.micro_batch_samples(rank, k).tolist()] for k in range(2)] for rank in range(2)]


@pytest.mark.parametrize("rank", [-1, 2, True, 1.0, "0", None])
def test_a_rank_that_does_not_exist_is_refused_everywhere(rank: Any) -> None:
    two = rs.build_dp_schedule(
        total_lengths=[5, 5, 5, 5],
        rollout_ids=range(4),
        global_batch_size=4,
        dp_size=2,
        max_tokens_per_gpu=5,
    )
    for read in (two.rank_view, lambda rank: two.micro_batch_samples(rank, 0)):
        with pytest.raises(rs.ScheduleError, match="does not exist"):
            read(rank)


@pytest.mark.parametrize("number", [-1, 2, 3, True, 0.0, "0", None])
def test_a_micro_batch_that_does_not_exist_is_refused(number: Any) -> None:
    """Rank 0 has two; its third would be the first of rank 1."""
    two = rs.build_dp_schedule(
        total_lengths=[5, 5, 5, 5],
        rollout_ids=range(4),
        global_batch_size=4,
        dp_size=2,
        max_tokens_per_gpu=5,
    )
    assert two.micro_batches_per_rank == 2
    first: Any = np.int64(1)
    assert two.micro_batch_samples(first, first).size == 1
    with pytest.raises(rs.ScheduleError, match="does not exist"):
        two.micro_batch_samples(0, number)
