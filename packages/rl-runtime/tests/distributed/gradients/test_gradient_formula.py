"""The gradient of one process is that of the loss's formula."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from rl_runtime.megatron.parallel_state import end_process_groups
from rl_runtime.weights.convert import export_hf_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.conftest import RunRanks
    from distributed.gradients.conftest import Array, Gradients, JoinMesh, Rank, Step

    from rl_metrics import Aggregation

pytestmark = pytest.mark.distributed


def _formula(
    place: Rank, step: Step, aggregations: set[Aggregation]
) -> dict[Aggregation, tuple[dict[str, Array], float]]:
    """Give the gradient of the loss as the formula says it, without reducer and scale.

    One process, one sample at a time, plain autograd.
    """
    masks, weights, ids = step.masks, step.weights, step.rollout_ids
    gradients = {}
    for aggregation in aggregations:
        model, _ = place.model(aggregation, torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        for i, mask in enumerate(masks):
            micro_batch = place.packer(torch.float64).pack(
                {"tokens": step.tokens, "loss_masks": step.loss_masks}, np.array([i])
            )
            logits = model(
                micro_batch.tokens_1T,
                micro_batch.positions_1T,
                None,
                packed_seq_params=micro_batch.stream,
            )[0]
            ids_of_sample = torch.from_numpy(step.tokens[i].copy())
            first = len(ids_of_sample) - len(mask)
            chosen = torch.log_softmax(logits[first - 1 : len(ids_of_sample) - 1], dim=-1).gather(
                1, ids_of_sample[first:, None]
            )[:, 0]
            trained = torch.from_numpy(mask.copy()) == 1
            divisor = (
                sum(m.sum() for m in masks)
                if aggregation == "token_mean"
                else sum(m.sum() for m, j in zip(masks, ids, strict=True) if j == ids[i])
            )
            summed = -(torch.from_numpy(weights[i].copy())[trained] * chosen[trained]).sum()
            total = total + summed / float(max(divisor, 1)) / (
                1 if aggregation == "token_mean" else len(set(ids.tolist()))
            )
        torch.autograd.backward(total)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.grad
        tensors = export_hf_tensors(model, place.shape, place.topology)
        assert tensors is not None
        gradients[aggregation] = (
            {name: tensor.numpy() for name, tensor in tensors.items()},
            total.item(),
        )
    end_process_groups()
    return gradients


@pytest.mark.parametrize("size", [4, 3])
def test_the_gradient_of_one_process_is_that_of_the_formula(
    run_ranks: RunRanks,
    join_mesh: JoinMesh,
    model_folders: dict[int, Path],
    step: Step,
    one_process: dict[int, Gradients],
    difference: Callable[[dict[str, Array], dict[str, Array]], float],
    size: int,
) -> None:
    aggregations = {aggregation for _, aggregation, _ in one_process[size]}

    def rank_main(rank: int, rendezvous: str) -> dict[Aggregation, tuple[dict[str, Array], float]]:
        place = join_mesh(
            rank, rendezvous, size=size, mesh=(1, 1, 1, 1), folder=model_folders[size]
        )
        return _formula(place, step, aggregations)

    (formula,) = run_ranks(1, rank_main)
    assert set(formula) == {"rollout_mean", "token_mean"}
    for aggregation, (gradient, value) in formula.items():
        ours, reported = one_process[size][torch.float64, aggregation, "right"]
        assert reported == pytest.approx(value, rel=1e-6)
        assert difference(ours, gradient) <= 1e-6
