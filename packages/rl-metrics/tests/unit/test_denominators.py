"""Denominators and step units on worked numbers."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from rl_metrics import (
    AGGREGATIONS,
    Aggregation,
    MetricsError,
    count_step_units,
    loss_denominators,
    prompt_denominators,
    rollout_denominators,
)
from rl_metrics.aggregation.denominators import mask_sums
from rl_metrics.aggregation.loss_reduction import aggregate
from rl_metrics.aggregation.loss_reduction import loss_reducer as reference_reducer

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
def test_every_aggregation_has_its_denominators(
    aggregation: Aggregation, expected: list[int]
) -> None:
    assert (
        loss_denominators(aggregation, MASKS, rollout_ids=ROLLOUTS, group_ids=GROUPS).tolist()
        == expected
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", 6),
        ("sample_mean", 4),
        ("rollout_mean", 3),
        ("prompt_mean", 2),
        ("constant", 9),
    ],
)
def test_every_aggregation_has_its_units_and_fully_masked_ones_count(
    aggregation: Aggregation, expected: int
) -> None:
    assert (
        count_step_units(aggregation, MASKS, rollout_ids=ROLLOUTS, group_ids=GROUPS, constant=9)
        == expected
    )


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
        (
            lambda: loss_denominators(cast("Any", "mean"), MASKS),
            "unknown loss aggregation 'mean'; use one of token_mean",
        ),
        (
            lambda: count_step_units("rollout_mean", MASKS, rollout_ids=[1, 2]),
            "4 loss masks but rollout_ids of shape",
        ),
        (
            lambda: count_step_units("prompt_mean", MASKS, group_ids=[1, 2]),
            "4 loss masks but group_ids of shape",
        ),
        (
            lambda: rollout_denominators([[1], [1]], cast("Any", [0.5, 1.0])),
            "rollout_ids: entries are of type float64; give integers",
        ),
        (
            lambda: rollout_denominators([[1], [1]], cast("Any", ["a", "b"])),
            "rollout_ids: entries are of type <U1",
        ),
        (
            lambda: rollout_denominators(cast("Any", None), []),
            "loss_masks, one per sample: got NoneType; give a list",
        ),
        (
            lambda: loss_denominators("sample_mean", [[1, 2]]),
            "sample 0: loss mask holds 2 at response token 1",
        ),
        (lambda: loss_denominators("sample_mean", [[[1]]]), "sample 0: loss mask has shape"),
    ],
)
def test_what_is_missing_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        call()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "mask",
    [[1, 2], [1, 0.5], [1, math.nan], [1, -1], ["1", "0"], [1, None], [1 + 0j, 0], [[1, 0]], 1],
    ids=repr,
)
def test_every_aggregation_refuses_the_masks_that_reducers_refuse(
    aggregation: Aggregation, mask: Any
) -> None:
    ids: dict[str, Any] = {"rollout_ids": [0], "group_ids": [0]}
    for call in (
        lambda: loss_denominators(aggregation, [mask], **ids),
        lambda: count_step_units(aggregation, [mask], constant=2, **ids),
        lambda: reference_reducer(aggregation, [3], [2], [mask], denominators=[1.0]),
    ):
        with pytest.raises(MetricsError, match="sample 0: loss mask"):
            call()


def test_an_array_of_padded_masks_is_refused() -> None:
    masks: Any = np.ones((2, 3))
    for call in (
        mask_sums,
        lambda masks: loss_denominators("constant", masks),
        lambda masks: count_step_units("sample_mean", masks),
    ):
        with pytest.raises(
            MetricsError,
            match=r"loss_masks is one array of shape \(2, 3\); give one flat mask per sample",
        ):
            call(masks)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_iterators_of_masks_and_ids_are_gone_through_once(aggregation: Aggregation) -> None:
    def ids() -> dict[str, Any]:
        return {"rollout_ids": iter(ROLLOUTS), "group_ids": iter(GROUPS)}

    lists: dict[str, Any] = {"rollout_ids": ROLLOUTS, "group_ids": GROUPS}
    masks: Any = MASKS
    values = [np.arange(len(mask)) for mask in MASKS]
    assert (
        loss_denominators(aggregation, iter(masks), **ids()).tolist()
        == loss_denominators(aggregation, MASKS, **lists).tolist()
    )
    assert count_step_units(aggregation, iter(masks), constant=9, **ids()) == count_step_units(
        aggregation, MASKS, constant=9, **lists
    )
    expected = aggregate(aggregation, values, MASKS, constant=9, **lists)
    assert (
        aggregate(aggregation, iter(cast("Any", values)), iter(masks), constant=9, **lists)
        == expected
    )


@pytest.mark.parametrize(
    "ids",
    [
        [2**100, 2**100, -1],
        [2**63, 2**63, 1],
        [2**64, 2**64, 2**63],
        np.array([2**63, 2**63, 1], np.uint64),
    ],
)
def test_ids_are_integers_of_any_size(ids: Any) -> None:
    assert rollout_denominators([[1], [1, 1], [1]], ids).tolist() == [3, 3, 1]
    assert count_step_units("rollout_mean", [[1], [1, 1], [1]], rollout_ids=ids) == 2


@pytest.mark.parametrize("ids", [[True, False], [1, 0.5], [1, "a"], [1, None]])
def test_ids_that_are_no_integers_are_refused(ids: Any) -> None:
    with pytest.raises(MetricsError, match="rollout_ids: entries are of type"):
        rollout_denominators([[1], [1]], ids)
