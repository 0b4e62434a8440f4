"""A padded micro-batch reduces to what its samples give without their padding."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_metrics import (
    AGGREGATIONS,
    Aggregation,
    MetricsError,
    loss_denominators,
    rollout_denominators,
)
from rl_metrics.aggregation.loss_reduction import aggregate_diagnostic
from rl_metrics.torch import loss_reducer, padded_loss_reducer

masks_of_samples = st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=5)


def _padded(rows: list[Any], width: int, *, left: bool, fill: float) -> torch.Tensor:
    out = torch.full((len(rows), width), fill, dtype=torch.float64)
    for i, row in enumerate(rows):
        start = width - len(row) if left else 0
        out[i, start : start + len(row)] = torch.as_tensor(row, dtype=torch.float64)
    return out


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(masks=masks_of_samples, extra=st.integers(0, 3), left=st.booleans(), seed=st.integers(0, 99))
def test_padding_changes_neither_value_nor_gradient_nor_weight(
    aggregation: Aggregation, masks: list[list[bool]], extra: int, left: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 2, len(masks)).tolist()
    denominators = loss_denominators(aggregation, masks, rollout_ids=ids, group_ids=ids)
    lengths = [len(mask) for mask in masks]
    values = [rng.normal(size=length) for length in lengths]
    width = max(lengths) + extra
    flat = torch.from_numpy(np.concatenate(values)).requires_grad_()
    packed = loss_reducer(
        aggregation, [n + 1 for n in lengths], lengths, masks, denominators=denominators
    )
    padded = padded_loss_reducer(
        aggregation, _padded(masks, width, left=left, fill=0.0), denominators=denominators
    )
    wide = _padded(values, width, left=left, fill=math.nan).requires_grad_()
    expected, got = packed(flat), padded(wide)
    torch.autograd.backward([expected, got])
    assert got.item() == pytest.approx(expected.item(), rel=1e-14, abs=1e-14)
    assert flat.grad is not None
    assert wide.grad is not None
    rows = [wide.grad[i, width - n :] if left else wide.grad[i, :n] for i, n in enumerate(lengths)]
    assert torch.equal(torch.cat(rows), flat.grad)
    assert wide.grad.count_nonzero() == flat.grad.count_nonzero()
    assert padded.num_tokens == packed.num_tokens == sum(map(sum, masks))
    assert padded.weight == pytest.approx(packed.weight, rel=1e-14)
    mean = aggregate_diagnostic(aggregation, values, masks, rollout_ids=ids, group_ids=ids)
    numerator, weight = padded.diagnostic(wide)
    assert not numerator.requires_grad
    if mean is None:
        assert (numerator.item(), weight) == (0.0, 0.0)
    else:
        assert numerator.item() / weight == pytest.approx(mean, rel=1e-12, abs=1e-12)


def test_a_padded_micro_batch_on_worked_numbers() -> None:
    mask = torch.tensor([[1, 1], [1, 0]])
    values = torch.tensor([[1.0, 3.0], [5.0, math.nan]])
    assert padded_loss_reducer("sample_mean", mask)(values).item() == 7.0
    assert padded_loss_reducer("token_mean", mask)(values).item() == 9.0
    assert padded_loss_reducer("rollout_mean", mask, denominators=[3, 3])(values).item() == 3.0
    empty = padded_loss_reducer("sample_mean", torch.zeros(0, 4))
    assert (empty(torch.zeros(0, 4)).item(), empty.weight, empty.num_tokens) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    "mask",
    [[[1, 0], [1, 1]], np.array([[1, 0], [1, 1]], object), torch.tensor([[1, 0], [1, 1]]).bool()],
    ids=["list", "objects", "booleans"],
)
def test_padded_masks_come_in_any_form(mask: Any) -> None:
    assert padded_loss_reducer("token_mean", mask)(torch.ones(2, 2)).item() == 3.0


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 0], r"the padded loss mask has shape \(2,\); give \[samples, tokens\]"),
        ([[1, 0], [1]], "the padded loss mask: cannot be read"),
        (torch.ones(1, 2, 3), r"has shape \(1, 2, 3\)"),
        ([[1, 0], [0.5, 1]], "sample 1: loss mask holds 0.5 at response token 0"),
        (torch.tensor([[1.0, math.nan]]), "sample 0: loss mask holds nan at response token 1"),
    ],
)
def test_what_is_no_padded_mask_is_refused(mask: Any, message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        padded_loss_reducer("sample_mean", mask)


def test_values_of_another_width_are_refused() -> None:
    reduce = padded_loss_reducer("sample_mean", [[1, 0, 1]])
    with pytest.raises(MetricsError, match=r"values of shape \(1, 2\); .* give \[1, 3\]"):
        reduce(torch.ones(1, 2))
    with pytest.raises(MetricsError, match="needs denominators computed over the whole step"):
        padded_loss_reducer("rollout_mean", [[1, 0, 1]])
    with pytest.raises(MetricsError, match=r"sample_denoms has shape \(2,\) for 1 samples"):
        padded_loss_reducer("rollout_mean", [[1, 0, 1]], denominators=[1.0, 2.0])


@pytest.mark.parametrize("column", [[4, 9, 4], [2.5, 1.0, 2.5]])
def test_tensors_are_ids_when_they_hold_integers(column: list[float]) -> None:
    ids: Any = torch.tensor(column)
    masks: Any = torch.tensor([[1, 1], [1, 0], [1, 0]])
    if ids.is_floating_point():
        with pytest.raises(MetricsError, match="rollout_ids: entries are of type float32"):
            rollout_denominators(masks, ids)
    else:
        assert rollout_denominators(masks, ids).tolist() == [3, 1, 3]


def test_what_a_micro_batch_reports_shares_nothing_with_its_loss() -> None:
    reduce = padded_loss_reducer("sample_mean", [[1, 1], [0, 0]])
    x = torch.tensor([[1.0, 3.0], [9.0, 9.0]], requires_grad=True)
    loss = reduce(x)
    reported = reduce.metrics(sums={"loss": loss}, diagnostics={"e": 2 * x})
    with torch.no_grad():
        loss /= 4
    (total,) = reported.sums.values()
    assert isinstance(total, torch.Tensor)
    assert (total.item(), total.requires_grad, reported.num_tokens) == (2.0, False, 2)
    ((numerator, weight),) = reported.diagnostics.values()
    assert (float(numerator), weight) == (4.0, 1.0)
    assert reported.metrics == ()
