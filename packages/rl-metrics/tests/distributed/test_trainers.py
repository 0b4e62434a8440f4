"""Gradients of a step in real DDP, FSDP2 and `Trainer.training_step`, against the closed form.

Each step has siblings on different ranks, masks with holes and NaN there, a fully masked rollout,
and ranks that differ in their number of samples.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rl_metrics import (
    AGGREGATIONS,
    Aggregation,
    ContextParallel,
    Layout,
    TrainerHook,
    ddp_loss_scale,
    fsdp_loss_scale,
    hf_trainer_loss_scale,
    megatron_loss_scale,
)
from rl_metrics.selftest.layout_checks import _local_losses
from rl_metrics.selftest.processes import run_gloo_ranks
from rl_metrics.selftest.scenario import CONSTANT, Scenario, make_scenario
from rl_metrics.torch import loss_reducer, padded_loss_reducer, step_divisors
from rl_metrics.torch.reducers import LossReducer

pytestmark = pytest.mark.distributed

SCENARIO = make_scenario(5)
MESHES = [(1, 2), (2, 1), (3, 1), (2, 2)]
"""Data-parallel and context-parallel ranks."""


class _Model(torch.nn.Module):
    """The scenario's loss of each token, as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(SCENARIO.parameters, dtype=torch.float64))

    def forward(
        self, batch: Scenario, cp: ContextParallel, masks: list[torch.Tensor]
    ) -> torch.Tensor:
        return _local_losses(batch, cp, self.weight, masks)


def _place(cp_size: int, layout: Layout = "zigzag") -> tuple[list[int], ContextParallel]:
    """Return this rank's samples and its place; data-parallel rank 0 has the most samples."""
    dp_rank, cp_rank = divmod(dist.get_rank(), cp_size)
    dp_size = dist.get_world_size() // cp_size
    cuts = np.cumsum([0, *(2 * (dp_size - r) for r in range(dp_size - 1)), SCENARIO.num_samples])
    mine = list(range(SCENARIO.num_samples))[cuts[dp_rank] : cuts[dp_rank + 1]]
    return mine, ContextParallel(cp_size, cp_rank, layout)


def _micro_batches(
    aggregation: Aggregation, mine: list[int], cp: ContextParallel, count: int
) -> Iterator[tuple[tuple[Any, ...], LossReducer]]:
    """Deal a rank's samples into micro-batches, so that siblings part; one may be empty."""
    denominators = SCENARIO.denominators(aggregation)
    for samples in (mine[k::count] for k in range(count)):
        batch = SCENARIO.part(samples)
        masks = [torch.from_numpy(mask) for mask in batch.loss_masks]
        reduce = loss_reducer(
            aggregation,
            batch.total_lengths,
            batch.response_lengths,
            masks,
            denominators=denominators[samples],
            cp=cp,
        )
        yield (batch, cp, masks), reduce


def _differences(
    step: Callable[[Aggregation], torch.Tensor], size: int
) -> dict[Aggregation, float]:
    """Run a step for every aggregation on so many ranks; the worst relative error of a gradient."""

    def work(_rank: int, _size: int) -> dict[Aggregation, float]:
        errors = {}
        for aggregation in AGGREGATIONS:
            expected = SCENARIO.expected_gradient(aggregation)
            error = np.linalg.norm(step(aggregation).numpy() - expected)
            errors[aggregation] = float(error / np.linalg.norm(expected))
        return errors

    ranks = run_gloo_ranks(work, size)
    return {name: float(np.max([errors[name] for errors in ranks])) for name in AGGREGATIONS}


def _no_sync(model: DistributedDataParallel, is_last: bool) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if is_last else model.no_sync()


def _gradient(model: DistributedDataParallel) -> torch.Tensor:
    grad: torch.Tensor = model.module.weight.grad
    return grad


def _ddp_step(
    aggregation: Aggregation, cp_size: int, scale: float, *, count: int | None, divided: bool
) -> torch.Tensor:
    """Return the gradient that DDP leaves; None: another number of micro-batches on every rank."""
    mine, cp = _place(cp_size)
    count = 1 + dist.get_rank() // cp_size if count is None else count
    model = DistributedDataParallel(_Model())
    for k, (inputs, reduce) in enumerate(_micro_batches(aggregation, mine, cp, count), start=1):
        with _no_sync(model, k == count):
            loss = reduce(model(*inputs)) * scale
            torch.autograd.backward(loss / count if divided else loss)
    return _gradient(model)


@pytest.mark.parametrize(("dp_size", "cp_size"), MESHES)
def test_ddp_whose_ranks_run_different_numbers_of_micro_batches(dp_size: int, cp_size: int) -> None:
    def step(aggregation: Aggregation) -> torch.Tensor:
        units = SCENARIO.step_units(aggregation)
        scale = ddp_loss_scale(aggregation, step_units=units, dp_size=dp_size, cp_size=cp_size)
        return _ddp_step(aggregation, cp_size, scale, count=None, divided=False)

    assert max(_differences(step, dp_size * cp_size).values()) <= 1e-13


@pytest.mark.parametrize("accumulation_steps", [3, 9])
def test_ddp_in_a_loop_that_divides_by_its_accumulation(accumulation_steps: int) -> None:
    def step(aggregation: Aggregation) -> torch.Tensor:
        units = SCENARIO.step_units(aggregation)
        scale = ddp_loss_scale(
            aggregation, step_units=units, dp_size=2, accumulation_steps=accumulation_steps
        )
        return _ddp_step(aggregation, 1, scale, count=accumulation_steps, divided=True)

    assert max(_differences(step, 2).values()) <= 1e-13


def _padded_step(aggregation: Aggregation, count: int) -> torch.Tensor:
    """Return the gradient of a loop whose ranks know their own samples, as padded tensors, only."""
    mine, _ = _place(1)
    batch = SCENARIO.part(mine)
    width = max(batch.response_lengths)
    masks = torch.zeros(len(mine), width, dtype=torch.int32)
    features = torch.full((len(mine), width, 2), 7.0, dtype=torch.float64)
    for i, length in enumerate(batch.response_lengths):
        masks[i, :length] = torch.from_numpy(batch.loss_masks[i])
        features[i, :length] = torch.from_numpy(batch.features[i])
    # As the data source of a trainer names them: by strings.
    ids = {
        "rollout_ids": [f"rollout {i}" for i in batch.rollout_ids],
        "group_ids": [f"prompt {i}" for i in batch.group_ids],
    }
    step = step_divisors(aggregation, masks, **ids, constant=CONSTANT, group=None)
    size = dist.get_world_size()
    scale = ddp_loss_scale(aggregation, step_units=step.step_units, dp_size=size)
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False, dtype=torch.float64))
    with torch.no_grad():
        model.module.weight.copy_(torch.tensor([SCENARIO.parameters]))
    for k in range(count):
        rows = list(range(k, len(mine), count))
        reduce = padded_loss_reducer(aggregation, masks[rows], denominators=step.denominators[rows])
        with _no_sync(model, k == count - 1):
            losses = model(features[rows]).squeeze(-1).square()
            torch.autograd.backward(reduce(losses) * scale)
    return _gradient(model)[0]


@pytest.mark.parametrize("dp_size", [2, 3])
def test_a_loop_of_padded_micro_batches_whose_ranks_know_their_own_samples_only(
    dp_size: int,
) -> None:
    def step(aggregation: Aggregation) -> torch.Tensor:
        return _padded_step(aggregation, 2 + dist.get_rank())

    assert max(_differences(step, dp_size).values()) <= 1e-13


def test_megatrons_factor_is_found_wrong_in_ddp() -> None:
    def step(aggregation: Aggregation) -> torch.Tensor:
        units = SCENARIO.step_units(aggregation)
        scale = megatron_loss_scale(
            aggregation, num_microbatches=3, step_units=units, dp_size=2, cp_size=1
        )
        return _ddp_step(aggregation, 1, scale, count=3, divided=False)

    assert min(_differences(step, 2).values()) >= 1.0


def _fsdp_gradient(
    aggregation: Aggregation, cp_size: int, shape: tuple[int, ...], *, divide_factor: float | None
) -> torch.Tensor:
    """Return the gradient that FSDP2 leaves over a mesh of this shape, gathered whole."""
    mine, cp = _place(cp_size)
    names = ("replicate", "shard")[-len(shape) :]
    model: Any = fully_shard(_Model(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    if divide_factor is not None:
        # gloo has no sum with a factor before it.
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(divide_factor)
    scale = fsdp_loss_scale(
        aggregation,
        step_units=SCENARIO.step_units(aggregation),
        dp_size=dist.get_world_size() // cp_size,
        cp_size=cp_size,
        gradient_divide_factor=divide_factor,
    )
    # Every forward gathers parameters, so ranks run equally many: some are empty.
    for k, (inputs, reduce) in enumerate(_micro_batches(aggregation, mine, cp, 4), start=1):
        model.set_requires_gradient_sync(k == 4)
        torch.autograd.backward(reduce(model(*inputs)) * scale)
    whole: torch.Tensor = model.weight.grad.full_tensor()
    return whole


@pytest.mark.parametrize(
    ("cp_size", "shape"),
    [(1, (2,)), (1, (4,)), (2, (4,)), (1, (2, 2))],
    ids=["dp 2", "dp 4", "dp 2 x cp 2", "hybrid"],
)
@pytest.mark.parametrize("divide_factor", [None, 3.0])
@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"),
    reason="this torch's FSDP2 does not reduce over gloo",
)
def test_fsdp2(cp_size: int, shape: tuple[int, ...], divide_factor: float | None) -> None:
    def step(aggregation: Aggregation) -> torch.Tensor:
        return _fsdp_gradient(aggregation, cp_size, shape, divide_factor=divide_factor)

    assert max(_differences(step, int(np.prod(shape))).values()) <= 1e-13


def _trainer(hook: TrainerHook, scale: float, accumulation_steps: int) -> Any:
    """Stand in for a Trainer around its own `training_step`; Accelerate is not installed here."""
    transformers = pytest.importorskip("transformers")
    accelerator = SimpleNamespace(
        backward=lambda loss: loss.backward(),
        distributed_type="MULTI_CPU",
        num_processes=dist.get_world_size(),
        parallelism_config=None,
    )
    trainer = SimpleNamespace(
        _prepare_context_parallel_inputs=lambda _, inputs: (contextlib.nullcontext, inputs),
        _prepare_inputs=lambda inputs: inputs,
        accelerator=accelerator,
        args=SimpleNamespace(
            average_tokens_across_devices=True, n_gpu=0, optim="", torch_empty_cache_steps=None
        ),
        compute_loss_context_manager=contextlib.nullcontext,
        compute_loss_func=None,
        current_gradient_accumulation_steps=accumulation_steps,
        label_smoother=None,
        model_accepts_loss_kwargs=False,
        optimizer=None,
    )

    def overridden(model: Any, inputs: dict[str, Any], **_: Any) -> torch.Tensor:
        reduce = inputs.pop("labels")
        loss: torch.Tensor = reduce(model(**inputs)) * scale
        return loss

    def given(outputs: Any, labels: LossReducer, **_: Any) -> torch.Tensor:
        return labels(outputs) * scale

    if hook == "compute_loss":
        trainer.compute_loss = overridden
    else:
        trainer.compute_loss_func = given
        trainer.compute_loss = lambda *a, **k: transformers.Trainer.compute_loss(trainer, *a, **k)
    trainer.training_step = lambda *a: transformers.Trainer.training_step(trainer, *a)
    return trainer


@pytest.mark.parametrize("hook", ["compute_loss", "compute_loss_func"])
@pytest.mark.parametrize(("dp_size", "accumulation_steps"), [(2, 1), (2, 4), (3, 2)])
def test_the_training_step_of_the_hugging_face_trainer(
    hook: TrainerHook, dp_size: int, accumulation_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("transformers.trainer")
    monkeypatch.setattr(
        module, "DistributedType", SimpleNamespace(DEEPSPEED="DEEPSPEED"), raising=False
    )

    def step(aggregation: Aggregation) -> torch.Tensor:
        mine, cp = _place(1)
        scale = hf_trainer_loss_scale(
            aggregation,
            step_units=SCENARIO.step_units(aggregation),
            dp_size=dp_size,
            accumulation_steps=accumulation_steps,
            hook=hook,
        )
        trainer = _trainer(hook, scale, accumulation_steps)
        model = DistributedDataParallel(_Model())
        batches = _micro_batches(aggregation, mine, cp, accumulation_steps)
        for k, ((batch, place, masks), reduce) in enumerate(batches, start=1):
            with _no_sync(model, k == accumulation_steps):
                inputs = {"batch": batch, "cp": place, "masks": masks, "labels": reduce}
                trainer.training_step(model, inputs, torch.tensor(7))
        return _gradient(model)

    assert max(_differences(step, dp_size).values()) <= 1e-13
