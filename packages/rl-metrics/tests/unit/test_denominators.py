"""Denominators and step units on worked numbers."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from rl_metrics import Aggregation, MetricsError, count_step_units, loss_denominators, prompt_denominators, rollout_denominators
from rl_metrics.denominators import mask_sums

MASKS = [[1, 1, 1], [0, 1], [1, 1, 0], [0]]
ROLLOUTS = [7, 3, 7, 5]
GROUPS = [0, 1, 0, 1]


def test_siblings_share_the_sum_of_their_masks_and_zero_counts_as_one() -> None:
    assert rollout_denominators(MASKS, ROLLOUTS).tolist() == [5, 1, 5, 1]


def test_a_prompt_group_shares_the_sum_of_its_masks() -> None:
    assert prompt_denominators(MASKS, GROUPS).tolist() == [5, 1, 5, 1]
    assert prompt_denominators(MASKS, [0, 0, 0, 0]).tolist() == [6, 6, 6, 6]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1, 1, 1, 1]),
        ("sample_mean", [3, 1, 2, 1]),
        ("rollout_mean", [5, 1, 5, 1]),
        ("prompt_mean", [5, 1, 5, 1]),
        ("constant", [1, 1, 1, 1]),
    ],
)
def test_every_aggregation_has_its_denominators(aggregation: Aggregation, expected: list[int]) -> None:
    assert loss_denominators(aggregation, MASKS, rollout_ids=ROLLOUTS, group_ids=GROUPS).tolist() == expected


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", 6), ("sample_mean", 4), ("rollout_mean", 3), ("prompt_mean", 2), ("constant", 9)]
)
def test_every_aggregation_has_its_units_and_fully_masked_ones_count(aggregation: Aggregation, expected: int) -> None:
    assert count_step_units(aggregation, MASKS, rollout_ids=ROLLOUTS, group_ids=GROUPS, constant=9) == expected


def test_an_empty_step_has_no_denominators() -> None:
    assert rollout_denominators([], []).size == 0


def test_empty_masks_have_no_tokens_wherever_they_stand() -> None:
    assert mask_sums([[], [1, 1], [], [], [0, 1], []]).tolist() == [0, 2, 0, 0, 1, 0]
    assert mask_sums([[], []]).tolist() == [0, 0]
    assert mask_sums([]).tolist() == []


def test_masks_may_be_arrays_of_bools() -> None:
    assert rollout_denominators([np.array([True, False])], [0]).tolist() == [1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rollout_denominators(MASKS, [1]), "4 loss masks but rollout_ids of shape"),
        (lambda: loss_denominators("rollout_mean", MASKS), "rollout_mean needs rollout_ids"),
        (lambda: loss_denominators("prompt_mean", MASKS), "prompt_mean needs group_ids"),
        (lambda: count_step_units("prompt_mean", MASKS), "prompt_mean needs group_ids"),
        (lambda: count_step_units("constant", MASKS), "the constant divisor"),
        (lambda: loss_denominators(cast("Any", "mean"), MASKS), "unknown loss aggregation 'mean'; use one of token_mean"),
        (lambda: count_step_units("rollout_mean", MASKS, rollout_ids=[1, 2]), "4 loss masks but rollout_ids of shape"),
        (lambda: count_step_units("prompt_mean", MASKS, group_ids=[1, 2]), "4 loss masks but group_ids of shape"),
        (lambda: rollout_denominators([[1], [1]], cast("Any", [0.5, 1.0])), "rollout_ids: entries are of type float64; give integers"),
        (lambda: rollout_denominators([[1], [1]], cast("Any", ["a", "b"])), "rollout_ids: entries are of type <U1"),
        (lambda: rollout_denominators(cast("Any", None), []), "loss_masks, one per sample: got NoneType; give a list"),
        (lambda: loss_denominators("sample_mean", [[1, 2]]), "sample 0: loss mask holds 2 at response token 1"),
        (lambda: loss_denominators("sample_mean", [[[1]]]), "sample 0: loss mask has shape"),
    ],
)
def test_what_is_missing_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        call()
