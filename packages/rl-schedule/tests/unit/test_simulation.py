"""The pipeline simulator against closed forms."""

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.balancing.rank_assignment import pipeline_order
from rl_schedule.study.simulation import (
    ClusterTiming,
    _program,
    pipeline_seconds,
    simulate_plan,
)


@pytest.mark.parametrize(
    ("stages", "chunks"),
    [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (2, 4), (4, 4), (8, 4)],
)
@pytest.mark.parametrize("turns", [1, 2, 8])
def test_equal_micro_batches_have_the_published_bubble(
    stages: int, chunks: int, turns: int
) -> None:
    """(P - 1) / (v M + P - 1) of the time, Narayanan et al. 2021."""
    count = stages * turns
    seconds = pipeline_seconds(np.ones((2, count)), pp_size=stages, vpp_size=chunks)
    assert seconds == pytest.approx(np.full(2, 3 * count * (1 + (stages - 1) / (chunks * count))))


def test_one_stage_takes_what_its_micro_batches_take() -> None:
    assert pipeline_seconds(np.array([[1.0, 2.0], [3.0, 4.0]]), pp_size=1).tolist() == [9.0, 21.0]


def test_two_stages_by_hand() -> None:
    """Forward 1 and 2 on two stages.

    Stage 1: F0 1-2, B0 2-4, F1 4-6 (ready at 3), B1 6-10; stage 0: F0 0-1, F1 1-3, B0 4-6, B1
    10-14.
    """
    assert pipeline_seconds(np.array([[1.0, 2.0]]), pp_size=2).tolist() == [14.0]


def test_fewer_micro_batches_than_stages() -> None:
    assert pipeline_seconds(np.ones((1, 1)), pp_size=4).tolist() == [12.0]


def test_no_pipeline_is_faster_than_its_busiest_stage() -> None:
    forward = np.random.default_rng(0).uniform(0.5, 2.0, (3, 16))
    for chunks in (1, 2, 4):
        seconds = pipeline_seconds(forward, pp_size=4, vpp_size=chunks)
        assert np.all(seconds >= 3 * forward.sum(axis=1))


def test_the_order_of_slots_saves_bubble() -> None:
    """Cheap at both ends beats descending, which beats costly at both ends, which beats chance."""
    costs = np.sort(np.random.default_rng(0).lognormal(0, 0.5, 24))[::-1].copy()
    ends = np.concatenate([costs[0::2], costs[1::2][::-1]])
    orders = [costs[pipeline_order(24)], costs, ends, np.random.default_rng(1).permutation(costs)]
    seconds = [float(pipeline_seconds(order[None], pp_size=8)[0]) for order in orders]
    assert seconds == sorted(seconds)
    assert seconds[0] < 0.95 * seconds[1]


def test_interleaving_needs_full_groups() -> None:
    with pytest.raises(
        rs.ScheduleError, match="5 micro-batches per rank are no multiple of the pipeline group 2"
    ):
        pipeline_seconds(np.ones((1, 5)), pp_size=2, vpp_size=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pp_size": 0}, "pp_size"),
        ({"cost_per_second": 0.0}, "cost_per_second"),
        ({"sync_seconds": -1.0}, "sync_seconds"),
        ({"vpp_size": 2}, "at least 2 stages"),
        ({"vpp_size": 2, "pp_size": 4, "pipeline_group": 2}, "pipeline group"),
    ],
)
def test_a_cluster_that_cannot_run_is_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(rs.ScheduleError, match=words):
        ClusterTiming(**settings)  # type: ignore[arg-type]


def test_shares_add_up_and_the_slowest_rank_counts() -> None:
    """Ranks 6 + 3 and 4 + 1 forward, times 3 with the backward, at 2 tokens per second."""
    request = rs.ScheduleRequest(
        total_lengths=[6, 4, 3, 1],
        rollout_ids=range(4),
        global_batch_size=4,
        dp_size=2,
        micro_batch_size=1,
        balance="none",
    )
    plan = rs.plan_schedule(request)
    (step,) = simulate_plan(
        plan,
        request.padded_lengths,
        rs.TokenCost(),
        ClusterTiming(cost_per_second=2.0, sync_seconds=1.0),
    )
    assert step.rank_seconds.tolist() == [3 * (6 + 3) / 2, 3 * (4 + 1) / 2]
    assert step.seconds == 13.5 + 1.0
    assert step.useful_share == pytest.approx(10.5 / 14.5)
    assert step.imbalance_share == pytest.approx(3.0 / 14.5)
    assert step.sync_share == pytest.approx(1.0 / 14.5)
    assert step.bubble_share == pytest.approx(0.0)


def test_meeting_after_every_micro_batch_takes_the_sum_of_the_slowest() -> None:
    request = rs.ScheduleRequest(
        total_lengths=[6, 1, 1, 6],
        rollout_ids=range(4),
        global_batch_size=4,
        dp_size=2,
        micro_batch_size=1,
        balance="none",
    )
    plan = rs.plan_schedule(request)
    (step,) = simulate_plan(plan, request.padded_lengths, rs.TokenCost(), ClusterTiming())
    assert step.rank_seconds.tolist() == [21.0, 21.0]
    assert step.lockstep_seconds == 36.0


def test_meeting_after_every_micro_batch_takes_all_stages_of_it() -> None:
    """Two stages of half the cost each, one after the other: the same 36 s as on one stage."""
    request = rs.ScheduleRequest(
        total_lengths=[6, 1, 1, 6],
        rollout_ids=range(4),
        global_batch_size=4,
        dp_size=2,
        micro_batch_size=1,
        balance="none",
    )
    (step,) = simulate_plan(
        rs.plan_schedule(request),
        request.padded_lengths,
        rs.TokenCost(),
        ClusterTiming(pp_size=2, sync_seconds=1.0),
    )
    assert step.lockstep_seconds == 36.0 + 1.0


def test_interleaved_stages_warm_up_as_long_as_megatron_s() -> None:
    """4 micro-batches in groups of 2 through 2 chunks on 2 stages; F is forward, B backward.

    Stage 0 warms up with 2 * 1 + 2 = 4 forwards, stage 1 with 2; then one forward and one backward
    in turn, backwards through the last chunk first.
    """
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert [
        " ".join(f"{'FB'[backward]}{chunk}{number}" for backward, chunk, number in program)
        for program in (_program(order, stage, 2, 2, 2) for stage in (0, 1))
    ] == [
        "F00 F01 F10 F11 F02 B10 F03 B11 F12 B00 F13 B01 B12 B13 B02 B03",
        "F00 F01 F10 B10 F11 B11 F02 B00 F03 B01 F12 B12 F13 B13 B02 B03",
    ]


def test_an_empty_plan_takes_no_time() -> None:
    plan = rs.build_dp_schedule(
        total_lengths=[],
        rollout_ids=[],
        global_batch_size=1,
        dp_size=2,
        max_tokens_per_gpu=8,
        on_trailing="partial_step",
    )
    assert simulate_plan(plan, np.empty(0, dtype=np.int64), rs.TokenCost(), ClusterTiming()) == []
