"""The handed cases by the tensor code.

One micro-batch per sample, on one to four context-parallel ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from rl_metrics import ContextParallel, count_step_units, loss_denominators, response_slice
from rl_metrics.torch import loss_reducer

if TYPE_CHECKING:
    from conftest import HandedStep


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensor_reducer_gives_the_handed_value_one_micro_batch_per_sample(
    handed_step: HandedStep, dtype: torch.dtype, cp_size: int
) -> None:
    values, masks, aggregation = handed_step.values, handed_step.masks, handed_step.aggregation
    ids = dict(handed_step.ids)
    constant = ids.pop("constant", None)
    denominators = loss_denominators(aggregation, masks, **ids)
    units = count_step_units(aggregation, masks, **ids, constant=constant)
    total = 0.0
    for value, mask, denominator in zip(values, masks, denominators, strict=True):
        prompt, response = 3, len(value)
        for rank in range(cp_size):
            cp = ContextParallel(size=cp_size, rank=rank)
            owned = response_slice(prompt + response, response, cp).response_indices
            x = torch.tensor(value[owned], dtype=dtype, requires_grad=True)
            reduce = loss_reducer(
                aggregation,
                [prompt + response],
                [response],
                [mask],
                denominators=[denominator],
                cp=cp,
            )
            loss = reduce(x)
            torch.autograd.backward(loss)
            assert x.grad is not None
            assert torch.isfinite(x.grad).all()
            assert (x.grad[torch.from_numpy(mask[owned] == 0)] == 0).all()
            total += loss.item()
    if handed_step.expect is None:
        assert (total, units) == (handed_step.loss, 0)
    else:
        assert total / units == pytest.approx(handed_step.expect, rel=1e-6)
