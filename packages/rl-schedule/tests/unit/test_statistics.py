"""The figures of a plan, each against a number worked out by hand."""

import pytest

import rl_schedule as rs

TWO_STEPS = rs.build_dp_schedule(
    total_lengths=[4, 3, 6, 6],
    rollout_ids=[0, 1, 2, 3],
    global_batch_size=2,
    dp_size=2,
    max_tokens_per_gpu=6,
    balance="none",
    cost=rs.TokenCost(),
)
"""One sample per rank and step, at a cap of 6: 4 beside 3, then 6 beside 6. A token costs 1."""


def test_fill_counts_the_room_of_all_ranks() -> None:
    """7 of 2 * 6 tokens, then 12 of 12; together 19 of 24."""
    assert [step.fill for step in TWO_STEPS.stats.steps] == [7 / 12, 1.0]
    assert TWO_STEPS.stats.fill == 19 / 24


def test_the_cost_of_a_step_is_that_of_an_average_rank() -> None:
    assert [step.mean_rank_cost for step in TWO_STEPS.stats.steps] == [3.5, 6.0]


def test_imbalances_of_steps_count_by_their_cost() -> None:
    """Ranks wait for 4 against a mean of 3.5, then for nobody: (4 + 6) / (3.5 + 6) = 20 / 19.

    Counted alike, the two steps would give (8 / 7 + 1) / 2 = 15 / 14. Nothing better exists: the
    sample of 4 is on some rank, and with one micro-batch per rank, ranks and slots are the same.
    """
    stats = TWO_STEPS.stats
    assert [step.rank_imbalance for step in stats.steps] == [8 / 7, 1.0]
    assert [step.rank_bound for step in stats.steps] == [8 / 7, 1.0]
    for figure in ("rank_imbalance", "rank_bound", "slot_imbalance", "slot_bound"):
        assert getattr(stats, figure) == pytest.approx(20 / 19), figure


def test_micro_batches_of_steps_add_up() -> None:
    assert (TWO_STEPS.stats.micro_batches, TWO_STEPS.stats.micro_batch_bound) == (2, 2)


def test_the_bounds_of_a_step_have_their_values() -> None:
    """Cap 8 on 2 ranks, squares: an 8 (64) and eight 2s (4 each), 96 in all, 48 per rank.

    - Micro-batches: 24 tokens need 3, aligned 4, 2 per rank.
    - Ranks: someone runs the 8, so 64 / 48.
    - The plan gives that rank a 2 as well, so that no micro-batch is empty: 68 / 48, and slots of
      64 and 12 (three 2s beside the lone one): 76 / 48.
    - Slots: the other rank does 96 - 68 = 28, and at most 16 of it beside the 8, where it idles for
      48. So no plan with these ranks ends before 28 + 48 = 76, and 75 is proven not to do.
    """
    plan = rs.build_dp_schedule(
        total_lengths=[8, *[2] * 8],
        rollout_ids=range(9),
        global_batch_size=9,
        dp_size=2,
        max_tokens_per_gpu=8,
        cost=rs.QuadraticCost(linear=0),
    )
    (step,) = plan.stats.steps
    assert (step.micro_batches, step.micro_batch_bound, step.fillers) == (2, 2, 0)
    assert (step.rank_imbalance, step.rank_bound) == (68 / 48, 64 / 48)
    assert (step.slot_imbalance, step.slot_bound) == (76 / 48, 75 / 48)
    assert step.mean_rank_cost == 48.0


def test_static_packing_is_bound_by_its_dearest_sample() -> None:
    """Tokens 6 + 1 + 1 on 2 ranks, 4 each: 6 / 4; three micro-batches, aligned 4, 2 per rank."""
    plan = rs.build_dp_schedule(
        total_lengths=[6, 1, 1],
        rollout_ids=range(3),
        global_batch_size=3,
        dp_size=2,
        micro_batch_size=1,
        cost=rs.TokenCost(),
    )
    (step,) = plan.stats.steps
    assert (step.micro_batch_bound, step.rank_bound, step.fill) == (2, 1.5, None)
    assert step.slot_bound == step.rank_imbalance == 1.5
