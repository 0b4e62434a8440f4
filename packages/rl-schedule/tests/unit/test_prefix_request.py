"""A request for shared prefixes that exists is well-formed; everything wrong is told at once."""

from typing import Any, cast

import numpy as np
import pytest

import rl_schedule as rs


def schedule(**settings: Any) -> rs.ScheduleRequest:
    given: dict[str, Any] = {
        "total_lengths": [7, 6, 5],
        "rollout_ids": [0, 1, 2],
        "global_batch_size": 3,
        "dp_size": 1,
        "max_tokens_per_gpu": 14,
    }
    return rs.ScheduleRequest(**given | settings)


def refused(
    given: rs.ScheduleRequest, prefix_ids: Any = (0, 0, 1), prefix_lengths: Any = (4, 4, 2)
) -> str:
    with pytest.raises(rs.ScheduleError) as caught:
        rs.PrefixRequest(schedule=given, prefix_ids=prefix_ids, prefix_lengths=prefix_lengths)
    return str(caught.value)


def test_columns_are_kept_as_read_only_int64() -> None:
    request = rs.PrefixRequest(
        schedule=schedule(), prefix_ids=[0, 0, 1], prefix_lengths=np.array([4, 4, 2], np.int32)
    )
    for column in (request.prefix_ids, request.prefix_lengths):
        assert isinstance(column, np.ndarray)
        assert column.dtype == np.int64
        assert not column.flags.writeable
    assert request.response_lengths.tolist() == [3, 2, 3]
    assert request.token_cap == 14


def test_the_cost_is_that_of_the_schedule_and_tokens_are_levelled_when_asked_for() -> None:
    model = rs.TransformerCost(token_flops=1, pair_flops=1)
    columns: dict[str, Any] = {"prefix_ids": [0, 0, 1], "prefix_lengths": [4, 4, 2]}
    flops = rs.PrefixRequest(schedule=schedule(cost=model), **columns)
    tokens = rs.PrefixRequest(schedule=schedule(cost=model, balance="tokens"), **columns)
    assert flops.cost_model == flops.balance_model == rs.PrefixCost(model=model)
    assert tokens.cost_model == rs.PrefixCost(model=model)
    assert tokens.balance_model == rs.PrefixCost(model=rs.TokenCost())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_tokens_per_gpu": None, "micro_batch_size": 2}, "micro_batch_size=2"),
        ({"balance": "none"}, "balance='none'"),
        ({"rank_slack": 0.01}, "rank_slack=0.01"),
        ({"rank_slack": "auto"}, "rank_slack='auto'"),
        ({"pad_to_multiple": 4}, "pad_to_multiple=4"),
        ({"max_samples_per_micro_batch": 2}, "max_samples_per_micro_batch=2"),
        ({"equal_samples": True}, "equal_samples=True"),
        ({"pad_to_longest": True}, "pad_to_longest=True"),
        ({"sample_costs": [1.0, 2.0, 3.0]}, "sample_costs"),
        ({"keep_together": [0, 1, 2]}, "keep_together"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings: Any, named: str) -> None:
    assert f"{named} is not possible with shared prefixes" in refused(schedule(**settings))


@pytest.mark.parametrize("extra", ["auto", 0])
def test_leave_to_run_one_more_micro_batch_is_no_obstacle(extra: Any) -> None:
    request = rs.PrefixRequest(
        schedule=schedule(extra_micro_batches=extra),
        prefix_ids=[0, 0, 1],
        prefix_lengths=[4, 4, 2],
    )
    assert rs.plan_with_prefixes(request).num_microbatches == (1,)


def test_ids_may_be_strings() -> None:
    names = schedule(rollout_ids=["a", "b", "c"])
    request = rs.PrefixRequest(
        schedule=names, prefix_ids=["why", "why", "how"], prefix_lengths=[4, 4, 2]
    )
    assert np.asarray(request.prefix_ids).tolist() == [0, 0, 1]
    assert request.prefix_names == ("why", "how")
    plan = rs.plan_with_prefixes(request)
    assert plan.tree_prefix_ids.tolist() == [0, 1]
    assert rs.check_prefix_plan(plan, request) == []


def test_columns_of_another_length_are_refused() -> None:
    text = refused(schedule(), [0, 0], [4, 4, 2])
    assert "total_lengths has 3 samples, prefix_ids 2 and prefix_lengths 3" in text


@pytest.mark.parametrize("lengths", [[4, 4, 5], [4, 4, 6], [4, 4, -1]])
def test_a_prefix_leaves_every_sample_a_token_of_its_own(lengths: list[int]) -> None:
    assert f"sample 2 ({lengths[2]} of 5 tokens)" in refused(schedule(), [0, 0, 1], lengths)


def test_samples_of_one_prefix_have_one_length() -> None:
    text = refused(schedule(), [8, 8, 8], [4, 3, 2])
    assert "first of their id: 1 (id 8, 3 tokens), 2 (id 8, 2 tokens)" in text


def test_all_problems_are_told_at_once() -> None:
    text = refused(schedule(rank_slack=0.1, pad_to_multiple=2), [0.5, 0, 1], ["a", 4, 2])
    for part in ("prefix_ids must be integers", "prefix_lengths must be integers", "slack", "pad"):
        assert part in text
    text = refused(schedule(), [3, 3, 3], [4, 9, 2])
    assert "sample 1 (9 of 6 tokens)" in text
    assert "2 (id 3, 2 tokens)" in text


def test_long_lists_of_samples_are_cut_short() -> None:
    many = rs.ScheduleRequest(
        total_lengths=[5] * 9,
        rollout_ids=range(9),
        global_batch_size=9,
        dp_size=1,
        max_tokens_per_gpu=14,
    )
    text = refused(many, range(9), [5] * 9)
    assert "sample 0 (5 of 5 tokens), 1 (5 of 5 tokens)" in text
    assert "4 (5 of 5 tokens), ...;" in text
    assert "4 (id 0, 2 tokens), 5 (id 0, 2 tokens), ...;" in refused(many, [0] * 9, [3, *[2] * 8])


GOOD = rs.PrefixRequest(schedule=schedule(), prefix_ids=[0, 0, 1], prefix_lengths=[4, 4, 2])


@pytest.mark.parametrize("given", [None, schedule(), {}])
def test_another_object_in_place_of_the_request_is_refused(given: Any) -> None:
    words = f"request must be a PrefixRequest, got {type(given).__name__}"
    with pytest.raises(rs.ScheduleError, match=words):
        rs.plan_with_prefixes(given)
    with pytest.raises(rs.ScheduleError, match=words):
        rs.check_prefix_plan(rs.plan_with_prefixes(GOOD), given)
    with pytest.raises(rs.ScheduleError, match="plan must be a PrefixPlan"):
        rs.check_prefix_plan(given, GOOD)


def test_another_object_in_place_of_the_schedule_is_told_with_the_rest() -> None:
    text = refused(cast("Any", None), [0.5, 0, 1])
    assert "prefix_ids must be integers" in text
    assert "schedule must be a ScheduleRequest, got NoneType" in text
    assert "schedule must be a ScheduleRequest, got PrefixRequest" in refused(cast("Any", GOOD))


@pytest.mark.parametrize("number", [0.0, False, None, "0", np.bool_(False)])
def test_a_rank_that_is_no_integer_is_refused(number: Any) -> None:
    plan = rs.plan_with_prefixes(GOOD)
    with pytest.raises(rs.ScheduleError, match="rank must be an integer"):
        plan.micro_batch(number, 0)
    with pytest.raises(rs.ScheduleError, match="micro_batch must be an integer"):
        plan.micro_batch(0, number)
    assert plan.micro_batch(cast("Any", np.int64(0)), 0).num_tokens == 14
