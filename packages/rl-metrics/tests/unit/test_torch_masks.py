"""What a mask may be: one rule for reducers, token counts and whitening, whatever holds it."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from rl_metrics import (
    AGGREGATIONS,
    Aggregation,
    ContextParallel,
    Metric,
    MetricsError,
    loss_denominators,
)
from rl_metrics.aggregation import loss_reduction as reference
from rl_metrics.torch import (
    get_sum_of_sample_mean,
    loss_reducer,
    masked_whiten,
    megatron_num_tokens,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "form",
    [
        "tensors",
        "lists",
        "arrays",
        "one tensor",
        "one tensor of bools",
        "bfloat16",
        "with a gradient",
        "bools",
    ],
)
def test_masks_come_in_any_form(form: str) -> None:
    rows = [[1, 0], [1]]
    masks: Any = {
        "tensors": [torch.tensor(row) for row in rows],
        "lists": rows,
        "arrays": [np.array(row, np.int32) for row in rows],
        "one tensor": torch.tensor([1, 0, 1]),
        "one tensor of bools": torch.tensor([True, False, True]),
        "bfloat16": [torch.tensor(row, dtype=torch.bfloat16) for row in rows],
        "with a gradient": [
            torch.tensor(row, dtype=torch.float32, requires_grad=True) for row in rows
        ],
        "bools": [torch.tensor(row, dtype=torch.bool) for row in rows],
    }[form]
    assert (
        get_sum_of_sample_mean([4, 3], [2, 1], masks)(torch.tensor([1.0, 3.0, 5.0])).item() == 6.0
    )
    assert megatron_num_tokens("token_mean", masks).item() == 2


def _forms(rows: list[list[Any]]) -> dict[str, Any]:
    """The same masks in every form that can hold them."""
    tensors = [torch.tensor(row) for row in rows]
    return {
        "lists": rows,
        "arrays": [np.array(row) for row in rows],
        "tensors": tensors,
        "bfloat16": [tensor.to(torch.bfloat16) for tensor in tensors],
        "one tensor": torch.cat(tensors),
    }


@pytest.mark.parametrize("bad", [0.5, 2, -1, NAN, INF, 1.0000001])
@pytest.mark.parametrize("form", ["lists", "arrays", "tensors", "bfloat16", "one tensor"])
def test_a_mask_that_is_not_0_or_1_is_refused_everywhere_by_sample_and_token(
    form: str, bad: float
) -> None:
    rows: list[list[Any]] = [[1, 0, 1], [], [1, bad]]
    masks = _forms(rows)[form]
    named = (
        "sample 2: loss mask holds .* at response token 1; a mask holds booleans, or exactly 0"
        " and 1"
    )
    if form == "bfloat16" and bad == 1.0000001:
        return  # bfloat16 has no number between 1 and 1.0078125
    calls: list[Callable[[], object]] = [
        lambda: get_sum_of_sample_mean([4, 1, 3], [3, 0, 2], masks),
        lambda: get_sum_of_sample_mean([4, 1, 3], [3, 0, 2], masks, None, True),
        lambda: get_sum_of_sample_mean([4, 1, 3], [3, 0, 2], masks, [1.0, 1.0, 1.0]),
        lambda: loss_reducer("token_mean", [4, 1, 3], [3, 0, 2], masks, cp=ContextParallel(2, 0)),
    ]
    if form in ("lists", "arrays", "tensors"):
        calls += [
            lambda: reference.get_sum_of_sample_mean([4, 1, 3], [3, 0, 2], masks),
            lambda: reference.get_sum_of_sample_mean([4, 1, 3], [3, 0, 2], masks, None, True),
            lambda: reference.aggregate("token_mean", [[1.0] * 3, [], [1.0] * 2], masks),
            lambda: loss_denominators("sample_mean", masks),
        ]
    if form != "one tensor":
        calls.append(lambda: megatron_num_tokens("token_mean", masks))
    for call in calls:
        with pytest.raises(MetricsError, match=named):
            call()


def test_one_tensor_of_masks_without_lengths_names_the_position() -> None:
    with pytest.raises(MetricsError, match="loss mask holds 2 at response token 1"):
        megatron_num_tokens("token_mean", torch.tensor([1, 2, 0]))


@pytest.mark.parametrize("bad", [0.5, 2.0, -1.0, NAN])
def test_whitening_refuses_the_same_masks(bad: float) -> None:
    with pytest.raises(
        MetricsError, match=r"sample 1: the mask holds .* at index 0, 1; a mask holds booleans"
    ):
        masked_whiten(
            [torch.ones(2), torch.ones(1, 2)], [torch.ones(2), torch.tensor([[1.0, bad]])]
        )
    with pytest.raises(MetricsError, match=r"sample 0: the mask holds .* at index 1"):
        masked_whiten(torch.ones(2), torch.tensor([1.0, bad]))


def test_a_reducer_keeps_its_own_copy_of_the_masks() -> None:
    masks = torch.tensor([True, True])
    reduce = loss_reducer("token_mean", [3], [2], masks)
    masks[0] = False
    assert reduce(torch.ones(2)).item() == 2.0


def test_iterators_of_masks_are_gone_through_once() -> None:
    def masks() -> Any:
        return iter([torch.tensor([1, 0]), torch.tensor([1])])

    assert (
        loss_reducer("sample_mean", [4, 3], [2, 1], masks())(torch.tensor([1.0, 3.0, 5.0])).item()
        == 6.0
    )
    assert megatron_num_tokens("token_mean", masks()).item() == 2
    with pytest.raises(MetricsError, match="the list of lengths: entries are of type object"):
        loss_reducer("sample_mean", cast("Any", iter([4, 3])), [2, 1], masks())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "masks",
    [
        [[1, 2]],
        [[1, 0.5]],
        [[1, NAN]],
        [torch.tensor([1.0, NAN])],
        [torch.tensor([1, 1j])],
        [torch.tensor([1 + 0j, 0])],
        torch.tensor([1, 2]),
        torch.tensor([1 + 0j, 0]),
        torch.ones(1, 2),
        torch.ones(1, 2, dtype=torch.bool),
        np.ones((1, 2)),
        [torch.ones(1, 2)],
    ],
    ids=repr,
)
def test_num_tokens_and_reducers_refuse_the_same_masks(
    aggregation: Aggregation, masks: Any
) -> None:
    for call in (
        lambda: megatron_num_tokens(aggregation, masks),
        lambda: loss_reducer(aggregation, [3], [2], masks, denominators=[1.0]),
    ):
        with pytest.raises(MetricsError, match=r"loss.mask"):
            call()


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([1, 0]).bfloat16(),
        torch.tensor([1.0, 0.0], requires_grad=True),
        torch.tensor([True, False]),
    ],
)
def test_tensors_of_any_kind_are_masks_everywhere(mask: torch.Tensor) -> None:
    assert loss_denominators("sample_mean", [mask]).tolist() == [1.0]
    assert megatron_num_tokens("token_mean", [mask]).item() == 1
    assert loss_reducer("token_mean", [3], [2], [mask])(torch.tensor([3.0, NAN])).item() == 3.0
    assert Metric.of_moments("x", torch.tensor([3.0, NAN], requires_grad=True), mask).value == 3.0
    assert Metric.of_histogram("x", torch.tensor([0.0, NAN]).bfloat16(), mask).value == 0.0
