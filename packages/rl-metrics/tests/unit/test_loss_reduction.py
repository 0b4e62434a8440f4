"""The float64 reference: worked numbers, and what it refuses."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from rl_metrics import ContextParallel, MetricsError
from rl_metrics.aggregation.loss_reduction import aggregate, get_sum_of_sample_mean, loss_reducer


def test_sample_means_are_summed() -> None:
    assert get_sum_of_sample_mean([4, 3], [2, 1], [[1, 1], [1]])([1, 3, 5]) == 7.0


def test_two_ranks_add_up_to_one() -> None:
    # 7 tokens on 2 ranks: chunks of 2, logits 3, 4, 5; rank 1 owns positions 2..5, hence all of
    # them, divided by the full mask's 2.
    parts = [
        get_sum_of_sample_mean([7], [3], [[1, 0, 1]], cp=ContextParallel(2, rank))
        for rank in range(2)
    ]
    assert parts[0](np.empty(0)) + parts[1]([1.0, np.nan, 5.0]) == 3.0


def test_a_step_without_trained_tokens_has_no_mean() -> None:
    assert aggregate("sample_mean", [[1.0]], [[0]]) is None


def test_a_zero_denominator_counts_as_one() -> None:
    assert get_sum_of_sample_mean([3], [2], [[1, 1]], [0.0])([1.0, 2.0]) == 3.0


def test_a_wider_padding_moves_ownership() -> None:
    # Padded to 16 instead of 8: chunks of 4, so rank 0 of 2 owns logit 3 of the logits 3..5.
    assert (
        get_sum_of_sample_mean([7], [3], [[1, 1, 1]], cp=ContextParallel(2, 0), pad_multiple=16)(
            [6.0]
        )
        == 2.0
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_sum_of_sample_mean([4], [2], [[1]]), "sample 0: loss mask has 1 entries"),
        (lambda: get_sum_of_sample_mean([4], [2], []), "0 loss masks for 1 samples"),
        (lambda: get_sum_of_sample_mean([4], [2], [[1, 1]], [1, 2]), "one per sample"),
        (lambda: get_sum_of_sample_mean([4], [2], [[1, 1]])([1.0]), "this rank owns 2"),
        (lambda: loss_reducer("rollout_mean", [4], [2], [[1, 1]]), "computed over the whole step"),
        (
            lambda: loss_reducer("token_mean", [4], [2], [[1, 1]], denominators=[2]),
            "divides once per step",
        ),
        (lambda: aggregate("token_mean", [[1.0, 2.0]], [[1]]), "sample 0: values of shape"),
        (
            lambda: aggregate("token_mean", [[1.0]], [[1], [1]]),
            "values of 1 samples but 2 loss masks",
        ),
        (
            lambda: aggregate("token_mean", [["a"]], [[1]]),
            "sample 0: the values: entries are of type",
        ),
        (lambda: get_sum_of_sample_mean([4], [2], [[1, 1]], [np.nan]), "sample 0: denominator nan"),
        (
            lambda: get_sum_of_sample_mean([4, 4], [2, 2], [[1, 1]] * 2, [1, -1]),
            "sample 1: denominator -1.0",
        ),
        (
            lambda: get_sum_of_sample_mean([4], [2], [[1, 1]])(cast("Any", "x")),
            "the values: entries are of type",
        ),
        (
            lambda: get_sum_of_sample_mean([4], [2], [[1, 1]], stream_offsets=[0]),
            "belong to layout 'contiguous'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        call()
