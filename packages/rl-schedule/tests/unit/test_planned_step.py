"""The figures of one step, on steps small enough to work out by hand."""

import pytest

import rl_schedule as rs

SQUARES = rs.QuadraticCost(linear=0)


def test_figures_of_a_dynamic_step() -> None:
    """Squares 64, 16 and 16 under 8 on 2 ranks: the mean is 48, and the 8 has a rank for itself."""
    plan = rs.build_dp_schedule(
        total_lengths=[8, 4, 4],
        rollout_ids=range(3),
        global_batch_size=3,
        dp_size=2,
        max_tokens_per_gpu=8,
        cost=SQUARES,
    )
    (step,) = plan.stats.steps
    assert step.mean_rank_cost == 48.0
    assert step.rank_imbalance == step.rank_bound == 64 / 48
    assert step.slot_imbalance == step.slot_bound == 64 / 48
    assert (step.micro_batches, step.micro_batch_bound, step.fillers) == (1, 1, 0)
    assert step.fill == 1.0


def test_figures_of_a_static_step() -> None:
    """Squares 25, 1, 1 and 1 in chunks of 2 on 2 ranks: 26 and 2 of a mean of 14; 25 stay."""
    plan = rs.build_dp_schedule(
        total_lengths=[5, 1, 1, 1],
        rollout_ids=range(4),
        global_batch_size=4,
        dp_size=2,
        micro_batch_size=2,
        cost=SQUARES,
    )
    (step,) = plan.stats.steps
    assert step.mean_rank_cost == 14.0
    assert (step.rank_imbalance, step.rank_bound) == (26 / 14, 25 / 14)
    assert (step.micro_batches, step.micro_batch_bound, step.fill) == (1, 1, None)


def test_steps_count_in_the_summary_by_their_cost() -> None:
    """Steps of {8}, {4} on two ranks (64 of 40) and {2}, {2} (level): mean costs 40 and 4."""
    plan = rs.build_dp_schedule(
        total_lengths=[8, 4, 2, 2],
        rollout_ids=range(4),
        global_batch_size=2,
        dp_size=2,
        max_tokens_per_gpu=8,
        cost=SQUARES,
    )
    assert [step.mean_rank_cost for step in plan.stats.steps] == [40.0, 4.0]
    assert plan.stats.rank_imbalance == pytest.approx((40 * 1.6 + 4) / 44)
