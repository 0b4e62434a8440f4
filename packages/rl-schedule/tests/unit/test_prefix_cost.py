"""What shared prefixes cost, worked out by hand and against the pairs that a mask lets through."""

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.arrays import IntArray


def column(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def test_prefix_once_and_each_response_in_its_context() -> None:
    # t = 10, f = 4. Prefix of 3: 10*3 + 4*9/2 = 48. Response of 2: 10*2 + 4*(3*2 + 4/2) = 52.
    # Response of 1: 10 + 4*(3 + 1/2) = 24.
    cost = rs.PrefixCost(model=rs.TransformerCost(token_flops=10, pair_flops=4))
    assert cost.prefixes(column(3)).tolist() == [48]
    assert cost.responses(column(3, 3), column(2, 1)).tolist() == [52, 24]
    assert cost.micro_batch(column(9, 9), column(3, 3), column(2, 1)) == 48 + 52 + 24


def test_two_prefixes_are_charged_once_each() -> None:
    cost = rs.PrefixCost(model=rs.QuadraticCost(linear=1, quadratic=1))
    # Prefix 7 of 2 tokens: 2 + 4 = 6; responses of 1: 12 - 6 = 6 each. Prefix 4 of 1 token: 2; its
    # response of 3: 4 + 16 - 2 = 18.
    assert cost.micro_batch(column(7, 4, 7), column(2, 1, 2), column(1, 3, 1)) == 6 + 12 + 2 + 18


def test_a_prefix_of_no_tokens_is_free_and_its_response_a_sample_of_its_own() -> None:
    cost = rs.PrefixCost(model=rs.QuadraticCost(linear=3))
    assert cost.prefixes(column(0, 2)).tolist() == [0, 10]
    assert cost.responses(column(0), column(5)).tolist() == [40]


def test_no_samples_cost_nothing() -> None:
    assert rs.PrefixCost().micro_batch(column(), column(), column()) == 0.0


@pytest.mark.parametrize(
    "model",
    [
        rs.TokenCost(),
        rs.QuadraticCost(),
        rs.TransformerCost(token_flops=7, pair_flops=2, window_pair_flops=((4, 6), (9, 2))),
    ],
)
def test_one_response_costs_what_its_sample_costs(model: rs.CostModel) -> None:
    prefixes, responses = column(0, 1, 3, 8, 20), column(5, 1, 9, 2, 30)
    cost = rs.PrefixCost(model=model)
    assert np.array_equal(
        cost.prefixes(prefixes) + cost.responses(prefixes, responses), model(prefixes + responses)
    )


def test_pairs_are_those_of_the_attention_mask() -> None:
    """Of L tokens the cost counts L / 2 pairs less: s^2 / 2 stands for s (s + 1) / 2."""
    request = rs.PrefixRequest(
        schedule=rs.ScheduleRequest(
            total_lengths=[7, 6, 9, 4],
            rollout_ids=range(4),
            global_batch_size=4,
            dp_size=1,
            max_tokens_per_gpu=64,
        ),
        prefix_ids=[0, 0, 1, 0],
        prefix_lengths=[3, 3, 5, 3],
    )
    stream = rs.plan_with_prefixes(request).micro_batch(0, 0)
    pairs = rs.PrefixCost(model=rs.TransformerCost(token_flops=0, pair_flops=1)).micro_batch(
        stream.prefix_ids[stream.prefix_index],
        stream.prefix_lengths[stream.prefix_index],
        stream.response_lengths,
    )
    assert stream.num_tokens == 3 + 4 + 3 + 1 + 5 + 4
    assert int(stream.attention_mask().sum()) == pairs + stream.num_tokens / 2


def test_a_window_sees_no_more_of_the_prefix_than_it_reaches() -> None:
    # Window 4, prefix 6, response 2: each of its tokens attends to 4.
    model = rs.TransformerCost(token_flops=0, pair_flops=0, window_pair_flops=((4, 1),))
    assert rs.PrefixCost(model=model).responses(column(6), column(2)).tolist() == [8]


def test_a_cost_that_falls_with_the_length_is_refused() -> None:
    cost = rs.PrefixCost(model=lambda lengths: 100 - lengths)
    with pytest.raises(rs.ScheduleError, match=r"less for 5 tokens than for their first 3"):
        cost.responses(column(3), column(2))
