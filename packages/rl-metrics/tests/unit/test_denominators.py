"""Denominators and step units on worked numbers."""

import math
from collections.abc import Callable
from typing import Any, cast
from uuid import UUID

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
from rl_metrics.aggregation.ids import id_column
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
            lambda: rollout_denominators([[1], [1]], cast("Any", [b"a", b"b"])),
            "rollout_ids must be all integers or all strings",
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


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_of_one_padded_array_are_masks_with_zeros_behind(aggregation: Aggregation) -> None:
    padded: Any = np.zeros((4, 5), np.int32)
    for row, mask in zip(padded, MASKS, strict=True):
        row[: len(mask)] = mask
    ids: dict[str, Any] = {"rollout_ids": ROLLOUTS, "group_ids": GROUPS}
    for given in (padded, padded.astype(np.bool_), padded.astype(object)):
        assert mask_sums(given).tolist() == [3, 1, 2, 0]
        denominators = loss_denominators(aggregation, given, **ids)
        assert denominators.tolist() == loss_denominators(aggregation, MASKS, **ids).tolist()
        units = count_step_units(aggregation, given, constant=9, **ids)
        assert units == count_step_units(aggregation, MASKS, constant=9, **ids)
    values = [np.arange(len(mask), dtype=float) for mask in MASKS]
    wide: Any = np.full((4, 5), math.nan)
    for row, value in zip(wide, values, strict=True):
        row[: value.size] = value
    assert aggregate(aggregation, wide, padded, constant=9, **ids) == aggregate(
        aggregation, values, MASKS, constant=9, **ids
    )
    padded[2, 1] = 2
    with pytest.raises(MetricsError, match="sample 2: loss mask holds 2 at response token 1"):
        mask_sums(padded)


def test_an_array_of_masks_of_more_than_two_dimensions_is_refused() -> None:
    with pytest.raises(MetricsError, match=r"loss_masks is one array of shape \(2, 3, 1\)"):
        mask_sums(cast("Any", np.ones((2, 3, 1))))


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


@pytest.mark.parametrize(
    "ids",
    [
        [True, False],
        [1, 0.5],
        np.array([0.5, 1.0], object),
    ],
)
def test_ids_that_are_neither_integers_nor_strings_are_refused(ids: Any) -> None:
    with pytest.raises(MetricsError, match=r"rollout_ids: (entries are of type|cannot be read)"):
        rollout_denominators([[1], [1]], ids)


@pytest.mark.parametrize(
    ("ids", "beside"),
    [
        ([1, None], r"\[0\] is 1 and rollout_ids\[1\] is None$"),
        ([None, "a"], r"\[0\] is None and rollout_ids\[1\] is 'a'$"),
        ([b"a", 1], r"\[0\] is b'a' and rollout_ids\[1\] is 1$"),
        ([UUID(int=5), UUID(int=6)], r"\[0\] is UUID\('0{8}-.*5'\)$"),
        (np.array([UUID(int=5), "a"], object), r"\[0\] is UUID\(.*\) and rollout_ids\[1\] is 'a'$"),
    ],
)
def test_objects_that_are_no_ids_are_named_with_what_to_try(ids: Any, beside: str) -> None:
    words = r"rollout_ids must be all integers or all strings \(try str\(id\)\), but rollout_ids"
    with pytest.raises(MetricsError, match=words + beside):
        rollout_denominators([[1], [1]], ids)


@pytest.mark.parametrize("ids", [[1, "a"], np.array(["a", 1], object)])
def test_a_mixture_of_integers_and_strings_is_refused_by_its_place(ids: Any) -> None:
    with pytest.raises(MetricsError, match=r"rollout_ids must be all .* and rollout_ids\[1\] is"):
        rollout_denominators([[1], [1]], ids)


@pytest.mark.parametrize(
    "ids",
    [
        ["b", "a", "b"],
        ("b", "a", "b"),
        np.array(["b", "a", "b"]),
        np.array(["b", "a", "b"], object),
        np.array([5, -1, 5], object),
        np.array([2**70, 1, 2**70], object),
        np.array([5, 0, 5], np.uint8),
    ],
)
def test_ids_come_as_strings_or_integers_in_lists_arrays_and_arrays_of_objects(ids: Any) -> None:
    assert rollout_denominators([[1], [1, 1], [1]], ids).tolist() == [2, 2, 2]
    assert count_step_units("prompt_mean", [[1], [1, 1], [1]], group_ids=ids) == 2
    assert id_column(ids, 3, "ids").tolist() == [0, 1, 0]


@pytest.mark.parametrize("ids", [["a"], [], ["a", "b", "c"], np.array([["a", "b"]]), "ab"])
def test_one_id_belongs_to_each_sample(ids: Any) -> None:
    with pytest.raises(MetricsError, match="rollout_ids"):
        rollout_denominators([[1], [1]], ids)


def test_arrays_of_objects_are_lengths_masks_and_values() -> None:
    lengths: Any = np.array([4, 3], object)
    masks: Any = [np.array([1, 0], object), [True]]
    reduce = reference_reducer("sample_mean", lengths, cast("Any", np.array([2, 1], object)), masks)
    assert reduce(np.array([3.0, math.nan, 5.0], object)) == 8.0
    with pytest.raises(MetricsError, match="entries are of type object"):
        reference_reducer("sample_mean", cast("Any", np.array([4, None], object)), [2, 1], masks)
