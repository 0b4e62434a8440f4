"""Policies for data that does not fit, and the classes of fault that other schedulers had."""

import logging
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs


def plan(lengths: list[int], **settings: Any) -> rs.SchedulePlan:
    """One rollout per sample, all in one step, checked."""
    base: dict[str, Any] = {
        "total_lengths": lengths,
        "rollout_ids": range(len(lengths)),
        "global_batch_size": len(lengths),
        "dp_size": 1,
        **({} if "micro_batch_size" in settings else {"max_tokens_per_gpu": 8}),
    }
    request = rs.ScheduleRequest(**{**base, **settings})
    found = rs.plan_schedule(request)
    assert rs.check_plan(found, request) == []
    return found


def batches(found: rs.SchedulePlan, rank: int = 0) -> list[list[int]]:
    return [
        found.micro_batch_samples(rank, k).tolist() for k in range(found.micro_batches_per_rank)
    ]


def test_an_oversized_sample_is_alone_and_listed() -> None:
    found = plan([9, 4, 4], balance="none")
    assert batches(found) == [[0], [1, 2]]
    assert found.oversized_samples == (0,)


def test_an_oversized_sample_drops_its_whole_rollout_before_the_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rollout 0 goes with both samples, and the step is filled by rollouts 1 and 2 instead."""
    with caplog.at_level(logging.WARNING, logger="rl_schedule"):
        found = plan(
            [9, 4, 4, 4], rollout_ids=[0, 0, 1, 2], global_batch_size=2, on_oversized="drop"
        )
    assert (found.dropped_samples, found.dropped_rollouts, found.oversized_samples) == (
        (0, 1),
        (0,),
        (0,),
    )
    assert found.global_batch_sizes == (2,)
    assert "dropping 1 of 3 rollouts" in caplog.text


def test_an_oversized_sample_is_refused_with_its_number_and_length() -> None:
    with pytest.raises(
        rs.InfeasibleScheduleError, match=r"1 samples exceed the cap of 8 tokens.*1 \(9 tokens\)"
    ):
        plan([4, 9], on_oversized="error")


def test_dropping_every_rollout_is_an_error_unless_partial_steps_are_allowed() -> None:
    with pytest.raises(rs.InfeasibleScheduleError, match="0 rollouts are fewer than"):
        plan([9, 9], on_oversized="drop")
    assert plan([9, 9], on_oversized="drop", on_trailing="partial_step").num_microbatches == ()


@pytest.mark.parametrize(("lengths", "dropped"), [([9, 9], 2), ([9, 3], 1)])
def test_a_step_that_drops_left_too_small_names_the_cap_and_the_samples(
    lengths: list[int], dropped: int
) -> None:
    """Gathering more rollouts as long as these would not help."""
    with pytest.raises(rs.InfeasibleScheduleError) as caught:
        plan(lengths, on_oversized="drop")
    message = str(caught.value)
    assert f"{dropped} rollouts were dropped before" in message
    assert "the cap of 8 tokens per micro-batch: 0 (9 tokens)" in message
    assert 'raise max_tokens_per_gpu or cp_size, or set on_oversized="alone"' in message
    assert "gather more rollouts" not in message


def test_the_cap_is_compared_with_padded_lengths() -> None:
    """5 and 3 share 8 tokens; padded to 4 they are 8 and 4."""
    assert plan([5, 3]).num_microbatches == (1,)
    assert plan([5, 3], pad_to_multiple=4).num_microbatches == (2,)
    assert plan([5, 3], max_tokens_per_gpu=7, pad_to_multiple=4).oversized_samples == (0,)


@pytest.mark.parametrize("balance", ["none", "tokens", "flops"])
def test_missing_micro_batches_are_split_off_before_fillers_are_added(balance: str) -> None:
    """Four samples fit one micro-batch; four ranks get one each, five ranks need a filler."""
    assert plan([2, 2, 2, 2], dp_size=4, balance=balance).filler_micro_batches == ()
    found = plan([2, 2, 2, 2], dp_size=5, balance=balance)
    assert found.num_microbatches == (1,)
    assert len(found.filler_micro_batches) == 1


@pytest.mark.parametrize("balance", ["none", "flops"])
def test_fillers_are_refused_with_both_numbers(balance: str) -> None:
    with pytest.raises(
        rs.InfeasibleScheduleError, match=r"step 0 has 2 samples in 2 micro-batches but needs 4"
    ):
        plan([2, 2], dp_size=4, on_misaligned="error", balance=balance)
    assert (
        plan([2, 2], dp_size=2, on_misaligned="error", balance=balance).filler_micro_batches == ()
    )


def test_static_chunks_are_consecutive_and_never_split() -> None:
    found = plan([5, 1, 5, 1, 5], micro_batch_size=2, balance="none")
    assert batches(found) == [[0, 1], [2, 3], [4]]


def test_static_packing_is_refused_when_it_would_need_fillers() -> None:
    with pytest.raises(
        rs.InfeasibleScheduleError, match=r"5 samples in 3 micro-batches but needs 4"
    ):
        plan([5, 5, 5, 5, 5], micro_batch_size=2, dp_size=2, on_misaligned="error")


def test_static_packing_is_balanced_over_ranks_without_changing_its_chunks() -> None:
    """Chunks of cost 64, 1, 36, 25 (quadratic): 64 + 1 against 36 + 25."""
    found = plan([8, 1, 6, 5], micro_batch_size=1, dp_size=2, cost=rs.QuadraticCost(linear=0))
    assert sorted(sorted(int(i) for i in part) for part in found.partitions) == [[0, 1], [2, 3]]


def test_virtual_pipeline_counts_are_multiples_of_the_group() -> None:
    found = plan([4] * 10, dp_size=2, vpp_size=2, microbatch_group_size_per_vp_stage=3)
    assert found.num_microbatches == (3,)


def test_equal_counts_on_unequal_ranks() -> None:
    """Ranks with 32 and 4 tokens cannot choose their own counts: one plan decides for both."""
    found = plan([8, 8, 8, 8, 1, 1, 1, 1], dp_size=2)
    assert found.num_microbatches == (3,)
    assert {len(indices) for indices in found.micro_batch_indices} == {3}


@pytest.mark.parametrize("balance", ["none", "tokens", "flops"])
def test_extreme_numbers_do_not_overflow(balance: str) -> None:
    """The longest samples there are, and a cap that means none."""
    found = plan(
        [2**31 - 1] * 6 + [1], dp_size=2, max_tokens_per_gpu=2**62, cp_size=2, balance=balance
    )
    assert found.num_microbatches == (1,)
    assert found.stats.slot_imbalance >= found.stats.slot_bound >= 1.0
    assert plan([3, 2, 1], max_tokens_per_gpu=2**62, balance=balance).num_microbatches == (1,)


@pytest.mark.parametrize("balance", ["none", "tokens", "flops"])
def test_sevens_under_eight_are_alone(balance: str) -> None:
    assert plan([7] * 7, balance=balance).num_microbatches == (7,)


def test_three_packs_on_eight_ranks_train_all() -> None:
    found = plan([8, 8, 8], dp_size=8)
    assert found.sample_positions.size == 3
    assert len(found.filler_micro_batches) == 5


def test_four_prompts_with_fan_out_make_two_steps() -> None:
    ids = [0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3]
    found = plan([2] * 11, rollout_ids=ids, global_batch_size=2)
    assert found.global_batch_sizes == (2, 2)


def test_plain_mode_deals_in_turn() -> None:
    """First-fit opens 0: {0, 2}, 1: {1, 3}, 2: {4}, 3: {5}; ranks take 0, 2 and 1, 3."""
    found = plan([5, 4, 3, 2, 6, 7], dp_size=2, balance="none")
    assert batches(found, 0) == [[0, 2], [4]]
    assert batches(found, 1) == [[1, 3], [5]]


def test_plain_mode_splits_the_fullest_bin_by_longest_first() -> None:
    """One bin {4, 2, 1, 1} becomes {4} and {2, 1, 1}."""
    found = plan([4, 2, 1, 1], dp_size=2, balance="none")
    assert batches(found, 0) == [[0]]
    assert batches(found, 1) == [[1, 2, 3]]


def test_long_slots_are_not_at_the_ends_of_the_pipeline() -> None:
    rng = np.random.default_rng(0)
    found = plan(rng.integers(1, 900, 300).tolist(), dp_size=4, max_tokens_per_gpu=1000)
    costs = rs.QuadraticCost(linear=0)
    lengths = np.asarray(found.sample_positions)
    request = rs.ScheduleRequest(
        total_lengths=np.random.default_rng(0).integers(1, 900, 300),
        rollout_ids=range(300),
        global_batch_size=300,
        dp_size=4,
        max_tokens_per_gpu=1000,
    )
    assert lengths.size == 300
    per_slot = [
        max(
            int(costs(request.padded_lengths[found.micro_batch_samples(r, k)]).sum())
            for r in range(4)
        )
        for k in range(found.micro_batches_per_rank)
    ]
    assert int(np.argmax(per_slot)) in range(1, len(per_slot) - 1)


def test_auto_slack_lowers_the_slots_and_says_how_much_it_used() -> None:
    lengths = (
        np.clip(np.rint(np.random.default_rng(0).lognormal(8.0, 1.0, 2048)), 64, 32768)
        .astype(int)
        .tolist()
    )
    level, auto = (
        plan(lengths, dp_size=32, max_tokens_per_gpu=32768, rank_slack=slack)
        for slack in (0.0, "auto")
    )
    assert level.stats.rank_imbalance <= 1.0015
    assert auto.stats.slot_imbalance < level.stats.slot_imbalance - 0.003
    assert auto.stats.steps[0].rank_slack > 0.0
    assert auto.stats.rank_imbalance <= 1.0015 + auto.stats.steps[0].rank_slack


def test_a_given_slack_is_kept() -> None:
    lengths = (
        np.clip(np.rint(np.random.default_rng(1).lognormal(8.0, 1.0, 2048)), 64, 32768)
        .astype(int)
        .tolist()
    )
    found = plan(lengths, dp_size=32, max_tokens_per_gpu=32768, rank_slack=0.005)
    assert found.stats.steps[0].rank_slack == 0.005
    assert found.stats.rank_imbalance <= 1.0065


@pytest.mark.parametrize(
    "cost",
    [
        lambda lengths: np.zeros(lengths.size),
        lambda lengths: 1.0 / lengths,
        lambda lengths: lengths > 700,
    ],
)
def test_odd_cost_models_still_give_a_valid_plan(cost: Any) -> None:
    lengths = np.random.default_rng(0).integers(1, 900, 300).tolist()
    model = (
        (lambda values: cost(values).astype(float)) if cost(np.array([1])).dtype == bool else cost
    )
    plan(lengths, dp_size=4, max_tokens_per_gpu=1000, cost=model)
