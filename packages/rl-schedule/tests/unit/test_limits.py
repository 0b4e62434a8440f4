"""What micro-batches keep besides a token cap: counts, pairs, equal ranks, padding, own costs."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs

BASE: dict[str, Any] = {"dp_size": 1, "max_tokens_per_gpu": 100}


def request(lengths: list[int], **settings: Any) -> rs.ScheduleRequest:
    """One step; one rollout per sample unless pairs are given."""
    ids = settings.get("keep_together", range(len(lengths)))
    base = {"rollout_ids": ids, "global_batch_size": None, "splitter": "all", **BASE}
    if "micro_batch_size" in settings:
        del base["max_tokens_per_gpu"]
    return rs.ScheduleRequest(**{**base, "total_lengths": lengths, **settings})


def batches(lengths: list[int], **settings: Any) -> list[list[list[int]]]:
    """The micro-batches of each rank, checked."""
    asked = request(lengths, **settings)
    plan = rs.plan_schedule(asked)
    assert rs.check_plan(plan, asked) == []
    return [
        [plan.micro_batch_samples(rank, k).tolist() for k in range(plan.micro_batches_per_rank)]
        for rank in range(plan.dp_size)
    ]


@pytest.mark.parametrize("balance", ["none", "tokens", "flops"])
def test_a_micro_batch_holds_at_most_so_many_samples(balance: str) -> None:
    """Seven samples of 1 token under 100 tokens, but only 3 together: 3 micro-batches."""
    (rank,) = batches([1] * 7, max_samples_per_micro_batch=3, balance=balance)
    assert sorted(map(len, rank), reverse=True) in ([3, 3, 1], [3, 2, 2])


def test_a_limit_that_does_not_bind_leaves_the_plan_as_it_is() -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 300).tolist()
    plain = rs.plan_schedule(request(lengths, dp_size=4))
    assert rs.plan_schedule(request(lengths, dp_size=4, max_samples_per_micro_batch=300)) == plain


def test_counts_level_ranks_too() -> None:
    """8 samples of 9..2 tokens, two per micro-batch, two ranks: 44 tokens split 22 and 22."""
    lengths = [9, 8, 7, 6, 5, 4, 3, 2]
    found = batches(lengths, dp_size=2, max_samples_per_micro_batch=2, balance="tokens")
    assert [len(rank) for rank in found] == [2, 2]
    assert [sum(lengths[i] for batch in rank for i in batch) for rank in found] == [22, 22]


@pytest.mark.parametrize("balance", ["none", "tokens", "flops"])
@pytest.mark.parametrize(
    "limits",
    [{}, {"max_samples_per_micro_batch": 4}, {"pad_to_longest": True}, {"micro_batch_size": 4}],
)
def test_pairs_share_a_micro_batch(balance: str, limits: dict[str, Any]) -> None:
    lengths = np.random.default_rng(1).integers(1, 40, 60).tolist()
    pairs = np.arange(60) // 2
    for rank in batches(lengths, keep_together=pairs, dp_size=3, balance=balance, **limits):
        for batch in rank:
            assert sorted(batch) == sorted({i ^ 1 for i in batch})


def test_a_pair_above_the_cap_is_alone_or_dropped() -> None:
    """60 + 60 tokens exceed 100, though each of them fits."""
    plan = rs.plan_schedule(request([60, 60, 1, 1], keep_together=[5, 5, 6, 6]))
    assert plan.oversized_samples == (0, 1)
    assert sorted(batches([60, 60, 1, 1], keep_together=[5, 5, 6, 6])[0]) == [[0, 1], [2, 3]]
    dropped = rs.plan_schedule(
        request([60, 60, 1, 1], keep_together=[5, 5, 6, 6], on_oversized="drop")
    )
    assert dropped.dropped_samples == (0, 1)
    with pytest.raises(rs.InfeasibleScheduleError, match="0 \\(60 tokens\\), 1 \\(60 tokens\\)"):
        rs.plan_schedule(request([60, 60], keep_together=[5, 5], on_oversized="error"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_together": [1, 1], "rollout_ids": [1, 2]}, "different rollouts, first 1 and 0"),
        ({"keep_together": [1, 1], "max_samples_per_micro_batch": 1}, "joins 2 samples, first 0"),
        ({"keep_together": [1, 1], "micro_batch_size": 1}, "more than micro_batch_size = 1"),
        ({"keep_together": [1], "rollout_ids": [1, 2]}, "keep_together has 1"),
        ({"keep_together": [1.0, 2.0]}, "keep_together"),
        ({"micro_batch_size": 2, "max_samples_per_micro_batch": 2}, "no effect under static"),
        ({"micro_batch_size": 2, "pad_to_longest": True}, "no effect under static"),
        ({"max_samples_per_micro_batch": 0}, "max_samples_per_micro_batch"),
        ({"equal_samples": 1}, "equal_samples must be one of False, True"),
        ({"sample_costs": [1.0]}, "sample_costs has 1"),
        ({"sample_costs": [1.0, -2.0]}, "sample 1 has -2.0"),
        ({"sample_costs": [1.0, float("nan")]}, "sample 1 has nan"),
        ({"sample_costs": ["a", "b"]}, "sample_costs"),
        ({"sample_costs": [[1], [1, 2]]}, "sample_costs"),
        ({"sample_costs": 3.0}, "sample_costs must be a sequence"),
        ({"sample_costs": [True, False]}, "sample_costs"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(rs.ScheduleError, match=words):
        request([5, 6], **settings)


@pytest.mark.parametrize("balance", ["none", "tokens", "flops"])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_samples_per_micro_batch": 3},
        {"pad_to_longest": True},
        {"micro_batch_size": 3},
        {"keep_together": np.arange(48) // 2},
        {"vpp_size": 2, "microbatch_group_size_per_vp_stage": 3},
    ],
)
def test_ranks_have_equally_many_samples(balance: str, limits: dict[str, Any]) -> None:
    lengths = np.random.default_rng(2).integers(1, 90, 48).tolist()
    found = batches(lengths, dp_size=4, equal_samples=True, balance=balance, **limits)
    assert [sum(map(len, rank)) for rank in found] == [12] * 4


def test_equal_ranks_are_level() -> None:
    """512 lognormal lengths on 8 ranks: within 0.2 % of the mean at 64 samples each."""
    lengths = np.clip(np.random.default_rng(0).lognormal(7.6, 0.9, 512), 64, 16384).astype(int)
    asked = request(lengths.tolist(), dp_size=8, max_tokens_per_gpu=16384, equal_samples=True)
    assert rs.plan_schedule(asked).stats.rank_imbalance < 1.002


def test_one_very_long_sample_leaves_equal_ranks_level() -> None:
    """One of 32,768 tokens among 4,096 on 64 ranks; one item of each group of 64 gave 1.14."""
    lengths = np.random.default_rng(0).lognormal(7.6, 0.9, 4096)
    asked = request(
        np.clip(np.rint(lengths), 64, 32768).astype(int).tolist(),
        dp_size=64,
        max_tokens_per_gpu=32768,
        equal_samples=True,
    )
    assert rs.plan_schedule(asked).stats.rank_imbalance < 1.001


def test_ranks_that_cannot_be_equal_are_an_error_with_both_numbers() -> None:
    with pytest.raises(rs.InfeasibleScheduleError, match=r"step 0 has 5 samples, which 2 ranks"):
        rs.plan_schedule(request([1] * 5, dp_size=2, equal_samples=True))
    with pytest.raises(rs.InfeasibleScheduleError, match=r"3 units of 2 samples, which 2 ranks"):
        rs.plan_schedule(
            request([1] * 6, dp_size=2, equal_samples=True, keep_together=[0, 0, 1, 1, 2, 2])
        )


def test_ranks_share_groups_of_each_size_equally() -> None:
    """8 samples are a multiple of 2 ranks, but one group of 2 and 6 alone are not shared."""
    apart = request([1] * 8, dp_size=2, equal_samples=True, keep_together=[0, 0, *range(1, 7)])
    words = (
        r"groups of each size \(keep_together\) .* groups of 2 samples are a multiple of dp_size"
    )
    with pytest.raises(rs.InfeasibleScheduleError, match=words):
        rs.plan_schedule(apart)
    shared = [0, 0, 1, 1, *range(2, 6)]
    rs.plan_schedule(request([1] * 8, dp_size=2, equal_samples=True, keep_together=shared))


def test_equal_ranks_may_need_more_micro_batches_than_first_fit() -> None:
    """100 fills a micro-batch, and its rank runs a second sample; else 30, 10 and 10 share one."""
    lengths = [30, 10, 100, 10]
    assert len(batches(lengths, dp_size=2, equal_samples=True)[0]) == 2
    assert len(batches(lengths, dp_size=2)[0]) == 1


@pytest.mark.parametrize("balance", ["none", "tokens", "flops"])
def test_the_padded_footprint_keeps_the_cap(balance: str) -> None:
    """50 with three of 10 are 80 tokens, but padded to 50 they are 200 of 100."""
    lengths = [50, 10, 10, 10]
    (rank,) = batches(lengths, pad_to_longest=True, balance=balance)
    assert all(max(lengths[i] for i in batch) * len(batch) <= 100 for batch in rank)
    assert len(rank) == 2 or balance == "none"
    assert len(batches(lengths, balance=balance)[0]) == 1


def test_padded_micro_batches_hold_samples_of_like_length() -> None:
    """Sorted, 4 of 25 and 10 of 10 fill one micro-batch each; mixed they would need more."""
    (rank,) = batches([25, 10, 10, 10, 25, 10, 10, 10, 25, 10, 10, 10, 25, 10], pad_to_longest=True)
    assert sorted(map(len, rank)) == [4, 10]


def test_a_padded_micro_batch_costs_its_longest_sample_times_the_count() -> None:
    """{10, 10} costs 20 and {6, 5} costs 12 by tokens: mean 16, imbalance 20 / 16."""
    asked = request(
        [10, 10, 6, 5],
        dp_size=2,
        max_tokens_per_gpu=20,
        pad_to_longest=True,
        cost=rs.TokenCost(),
        max_samples_per_micro_batch=2,
    )
    assert rs.plan_schedule(asked).stats.rank_imbalance == 20 / 16


def test_costs_of_samples_are_levelled_instead_of_lengths() -> None:
    """Four samples of 10 tokens that cost 9, 1, 1, 9 on two ranks: 10 and 10."""
    found = batches([10] * 4, dp_size=2, sample_costs=[9, 1, 1, 9], max_tokens_per_gpu=20)
    assert sorted(sorted(i for batch in rank for i in batch) for rank in found) in (
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
    )
    plan = rs.plan_schedule(
        request([10] * 4, dp_size=2, sample_costs=[9, 1, 1, 9], max_tokens_per_gpu=20)
    )
    assert plan.stats.rank_imbalance == 1.0
    assert plan.stats.steps[0].mean_rank_cost == 10.0
    assert plan.settings["cost"] == {"kind": "custom", "parameters": {"name": "sample_costs"}}


def test_costs_of_samples_stand_beside_a_cost_model() -> None:
    """By tokens 4 + 4 | 4 + 4; one of them has 8 more: 12 | 4 + 4 + 4."""
    asked = request(
        [4] * 4, dp_size=2, sample_costs=[8, 0, 0, 0], cost=rs.TokenCost(), max_tokens_per_gpu=12
    )
    plan = rs.plan_schedule(asked)
    assert rs.check_plan(plan, asked) == []
    assert sorted(part.size for part in plan.partitions) == [1, 3]
    assert plan.stats.steps[0].mean_rank_cost == 12.0
    assert plan.settings["cost"]["parameters"]["name"].startswith("sample_costs + ")


PLAN_REQUEST = request([10, 10, 10, 10], dp_size=2, keep_together=[7, 7, 8, 8])
PLAN = rs.plan_schedule(PLAN_REQUEST)


@pytest.mark.parametrize(
    ("promise", "change", "settings", "samples"),
    [
        ("P11", {}, {"max_samples_per_micro_batch": 1, "keep_together": None}, (0, 1)),
        ("P12", {"sample_positions": np.array([0, 2, 1, 3])}, {}, (0, 1, 2, 3)),
        ("P13", {"micro_batch_offsets": np.array([0, 1, 4])}, {"equal_samples": True}, ()),
        ("P6", {}, {"keep_together": None, "max_tokens_per_gpu": 15}, (0, 1)),
        (
            "P6",
            {},
            {"keep_together": None, "max_tokens_per_gpu": 15, "pad_to_longest": True},
            (0, 1),
        ),
    ],
)
def test_a_broken_limit_is_found(
    promise: str, change: dict[str, Any], settings: dict[str, Any], samples: tuple[int, ...]
) -> None:
    assert sorted(PLAN.micro_batch_samples(0, 0).tolist()) == [0, 1]
    asked = dataclasses.replace(PLAN_REQUEST, **settings)
    broken = dataclasses.replace(PLAN, **change)
    found = [p for p in rs.check_plan(broken, asked) if p.promise == promise]
    assert [p for p in found if p.samples == samples], found


def test_a_micro_batch_above_the_cap_when_padded_is_found() -> None:
    """50 + 10 + 10 + 10 are 80 of 100 tokens; padded they are 4 * 50."""
    packed = rs.plan_schedule(request([50, 10, 10, 10]))
    (problem,) = rs.check_plan(packed, request([50, 10, 10, 10], pad_to_longest=True))
    assert (problem.promise, problem.samples) == ("P6", (0, 1, 2, 3))
    assert "holds 200 tokens, the cap is 100" in problem.message


def test_a_padded_plan_worse_than_strided_bins_is_found() -> None:
    """One sample per micro-batch: 9 + 8 + 7 on one rank, 3 + 2 + 1 on the other."""
    asked = request(
        [9, 8, 7, 3, 2, 1], dp_size=2, max_tokens_per_gpu=9, pad_to_longest=True,
        max_samples_per_micro_batch=1, cost=rs.TokenCost(),
    )  # fmt: skip
    good = rs.plan_schedule(asked)
    bad = dataclasses.replace(
        good, sample_positions=np.arange(6), micro_batch_offsets=np.arange(7), num_microbatches=(3,)
    )
    assert rs.check_plan(good, asked) == []
    assert [p.promise for p in rs.check_plan(bad, asked)] == ["P10"]


def test_steps_of_limits_follow_the_policies() -> None:
    assert rs.plan_schedule(
        request([1, 1], dp_size=3, max_samples_per_micro_batch=1)
    ).filler_micro_batches in (((2, 0),), ((1, 0),), ((0, 0),))
    with pytest.raises(
        rs.InfeasibleScheduleError, match=r"2 samples in 2 micro-batches but needs 3"
    ):
        rs.plan_schedule(
            request([1, 1], dp_size=3, max_samples_per_micro_batch=1, on_misaligned="error")
        )
