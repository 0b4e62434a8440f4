"""Gradients of a real Megatron-Core GPTModel are the same in every (dp, cp, tp, pp) of up to four
processes, and those of the loss's formula.

One step holds what splits badly: three micro-batches on every rank, one of them a filler at dp 4;
rollouts of one to three siblings dealt to different ranks and micro-batches; masks with holes; a
rollout without trained tokens; a NaN loss at every masked position; responses that leave
context-parallel ranks without a token. The same comparison with one wrong factor must fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from rl_dump import RaggedArray
from rl_metrics import (
    Aggregation,
    MicroBatchMetrics,
    count_step_units,
    loss_denominators,
    megatron_loss_scale,
    packed_responses,
)
from rl_metrics.torch import loss_reducer, reduce_train_step_metrics
from rl_runtime.batch.rank_batch import Column
from rl_runtime.config.recipe import Recipe
from rl_runtime.setup.tiny_model import write_tiny_model
from rl_runtime.training.micro_batch import MicroBatch, PackingRules, pack_micro_batch
from rl_runtime.megatron.cpu_shim import install_device_shim
from rl_runtime.training.scores import ResponseScores
from rl_runtime.megatron.model import build_model, megatron_config
from rl_runtime.megatron.shape import ModelShape, read_model_config
from rl_runtime.megatron.parallel_state import end_process_groups, start_process_groups
from rl_runtime.training.forward_backward import run_training_pass
from rl_runtime.megatron.rotary import RotaryTable
from rl_runtime.weights.convert import export_hf_tensors, load_hf_weights

if TYPE_CHECKING:
    from distributed.conftest import RunRanks

Mesh = tuple[int, ...]
"""Sizes of the axes, in the order of `AXES`."""
Array = npt.NDArray[np.float64]
Result = tuple[dict[str, Array] | None, float | None]
"""Gradient under Hugging Face names (on the writer rank), and the reported loss (on the last stage)."""
OneProcess = dict[int, dict[tuple[torch.dtype, Aggregation, str], tuple[dict[str, Array], float]]]
"""Gradients and losses of one process, by model, dtype, aggregation and scale."""
Sizes = Mapping[str, Any]
Scale = Callable[[Aggregation, Sizes], float]

pytestmark = pytest.mark.distributed

AXES = ("data", "context", "tensor", "pipeline")
MESHES: list[Mesh] = [
    mesh for mesh in itertools.product(range(1, 5), repeat=4) if np.prod(mesh) <= 4
]
AGGREGATIONS: tuple[Aggregation, ...] = ("rollout_mean", "token_mean")
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-5}
NUM_MICRO_BATCHES = 3
# Three ranks on the tensor or pipeline axis need a model that three divides.
SIZES: dict[int, dict[str, int]] = {
    4: {"num_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
    3: {"num_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3},
}
COMMON = {"hidden_size": 24, "head_dim": 8, "intermediate_size": 36, "max_position_embeddings": 128}
VOCAB_SIZE = 88

WRONG_SCALES: dict[str, Scale] = {
    "context-parallel ranks left out": lambda aggregation, sizes: (
        megatron_loss_scale(aggregation, **sizes) / sizes["cp_size"]
    ),
    "data-parallel ranks counted twice": lambda aggregation, sizes: (
        megatron_loss_scale(aggregation, **sizes) * sizes["dp_size"]
    ),
    "one unit too many": lambda aggregation, sizes: (
        megatron_loss_scale(aggregation, **sizes) * sizes["step_units"] / (sizes["step_units"] + 1)
    ),
}


def _right_scale(aggregation: Aggregation, sizes: Sizes) -> float:
    return megatron_loss_scale(aggregation, **sizes)


def _recipe(size: int, mesh: Mesh, aggregation: Aggregation) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"dir": "unused"},
            "model": COMMON | SIZES[size],
            "parallel": dict(zip(AXES, mesh, strict=True)),
            "algorithm": {"loss_aggregation": aggregation},
        }
    )


def _mesh_name(mesh: Mesh) -> str:
    return "".join(
        f"{axis}{size}" for axis, size in zip(("dp", "cp", "tp", "pp"), mesh, strict=True)
    )


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {}
    for size in SIZES:
        folders[size] = tmp_path_factory.mktemp("gradient") / f"model{size}"
        write_tiny_model(folders[size], _recipe(size, (1, 1, 1, 1), "rollout_mean").model, rng=11)
    return folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, all samples."""

    tokens: RaggedArray
    loss_masks: RaggedArray
    weights: RaggedArray
    """The loss weight of every response token."""
    rollout_ids: npt.NDArray[np.int64]

    @property
    def masks(self) -> list[npt.NDArray[np.int32]]:
        return [self.loss_masks[i] for i in range(len(self.loss_masks))]


@pytest.fixture(scope="session")
def step() -> Step:
    generator = np.random.default_rng(13)
    rollout_ids = np.array([0, 0, 0, 1, 2, 2, 3, 4, 4, 5, 6])
    responses = generator.integers(2, 30, rollout_ids.size)
    prompts = generator.integers(1, 12, rollout_ids.size)
    prompts[4], responses[4] = 60, 3  # mostly prompt: at cp 4 three ranks own nothing of it
    masks = []
    for rollout, length in zip(rollout_ids, responses, strict=True):
        mask = (generator.random(length) < 0.7).astype(np.int32)
        mask[-1] = 1
        masks.append(mask * np.int32(rollout != 3))
    tokens = [
        generator.integers(0, VOCAB_SIZE, prompt + response)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return Step(
        tokens=RaggedArray.from_list(tokens, np.int64),
        loss_masks=RaggedArray.from_list(masks, np.int32),
        weights=RaggedArray.from_list(
            [generator.normal(size=length) for length in responses], np.float64
        ),
        rollout_ids=rollout_ids,
    )


class _Rank:
    """One rank's model and place."""

    def __init__(self, rank: int, rendezvous: str, *, size: int, mesh: Mesh, folder: Path) -> None:
        install_device_shim()
        recipe = _recipe(size, mesh, "rollout_mean")
        self.size, self.mesh, self.folder = size, mesh, folder
        self.topology = start_process_groups(
            recipe.parallel,
            rank=rank,
            world_size=int(np.prod(mesh)),
            rendezvous=rendezvous,
            timeout_seconds=100,
        )
        self.shape = ModelShape.from_hf_config(read_model_config(folder))

    def model(self, aggregation: Aggregation, dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
        """This rank's part of the model with its weights, and its config."""
        config = megatron_config(self.shape, _recipe(self.size, self.mesh, aggregation))
        config.params_dtype = config.pipeline_dtype = dtype
        model = build_model(self.shape, config, self.topology)
        load_hf_weights(model, self.folder, self.shape, self.topology)
        return model, config

    def rules(self, dtype: torch.dtype) -> PackingRules:
        """How micro-batches are packed."""
        return PackingRules(
            cp=self.topology.context_parallel,
            tp_size=self.topology.tp_size,
            vocab_size=self.shape.vocab_size,
            rotary=RotaryTable(self.shape, self.topology.device),
            device=self.topology.device,
            dtype=dtype,
            use_kept_sets=False,
        )


def _losses(
    batch: MicroBatch, log_probs: torch.Tensor, weights: RaggedArray, flat: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Per-token losses of a micro-batch's local tokens, NaN where masked."""
    whole = np.concatenate([np.empty(0), *(weights[i] for i in batch.samples)])
    weight = torch.from_numpy(whole[flat]).to(log_probs.dtype)
    return -weight * log_probs + torch.where(batch.trained_K, 0.0, torch.nan).to(log_probs.dtype)


def _flat_indices(batch: MicroBatch, rules: PackingRules) -> npt.NDArray[np.int64]:
    return packed_responses(batch.total_lengths, batch.response_lengths, rules.cp).flat_indices


def _gradient(
    place: _Rank, step: Step, aggregation: Aggregation, dtype: torch.dtype, scale_of: Scale
) -> Result:
    topology, rules = place.topology, place.rules(dtype)
    model, config = place.model(aggregation, dtype)
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=dtype == torch.float32), model
    )
    masks = step.masks
    units = count_step_units(aggregation, masks, rollout_ids=step.rollout_ids)
    columns: dict[str, Column] = {
        "tokens": step.tokens,
        "loss_masks": step.loss_masks,
        "loss_denominators": (
            loss_denominators(aggregation, masks, rollout_ids=step.rollout_ids).astype(np.float32)
        ),
    }
    mine = np.arange(topology.dp_rank, len(masks), topology.dp_size)
    micro_batches = [
        pack_micro_batch(columns, mine[k::NUM_MICRO_BATCHES], rules)
        for k in range(NUM_MICRO_BATCHES)
    ]
    sizes = {
        "num_microbatches": NUM_MICRO_BATCHES,
        "step_units": units,
        "dp_size": topology.dp_size,
        "cp_size": topology.cp_size,
    }

    def loss(batch: MicroBatch, scores: ResponseScores) -> tuple[torch.Tensor, MicroBatchMetrics]:
        reducer = loss_reducer(
            aggregation,
            batch.total_lengths,
            batch.response_lengths,
            batch.loss_masks,
            denominators=batch.denominators,
            cp=rules.cp,
        )
        reduced = reducer(
            _losses(batch, scores.log_probs, step.weights, _flat_indices(batch, rules))
        )
        report = MicroBatchMetrics(
            sums={"loss": reduced.detach().clone()}, num_tokens=batch.num_trained_tokens
        )
        return reduced * scale_of(aggregation, sizes), report

    wrapped.zero_grad_buffer()
    reports = run_training_pass(
        wrapped,
        micro_batches,
        loss,
        temperature=1.0,
        wanted=frozenset(),
        tp_group=topology.tp_group,
    )
    value = None
    if topology.is_last_stage:
        value = reduce_train_step_metrics(
            reports,
            aggregation=aggregation,
            step_units=units,
            cp_size=topology.cp_size,
            group=topology.dp_cp_group,
        )["loss"]
    for parameter in model.parameters():
        parameter.data = getattr(parameter, "main_grad").to(dtype)
    tensors = export_hf_tensors(model, place.shape, topology)
    return (
        None
        if tensors is None
        else {name: tensor.double().numpy() for name, tensor in tensors.items()}
    ), value


def _steps_gradients(
    rank: int,
    rendezvous: str,
    *,
    size: int,
    mesh: Mesh,
    folder: Path,
    step: Step,
    scales: Mapping[str, Scale],
) -> dict[tuple[torch.dtype, Aggregation, str], Result]:
    """Gradient and loss of every dtype and aggregation with every scale."""
    place = _Rank(rank, rendezvous, size=size, mesh=mesh, folder=folder)
    try:
        return {
            (dtype, aggregation, name): _gradient(place, step, aggregation, dtype, scale_of)
            for dtype in BOUNDS
            for aggregation in AGGREGATIONS
            for name, scale_of in scales.items()
            if dtype == torch.float64 or name == "right"
        }
    finally:
        end_process_groups()


def _formula(
    rank: int, rendezvous: str, *, size: int, folder: Path, step: Step
) -> dict[Aggregation, tuple[dict[str, Array], float]]:
    """Gradient of the loss as the formula says it: one process, one sample at a time, plain autograd, no reducer and no scale."""
    place = _Rank(rank, rendezvous, size=size, mesh=(1, 1, 1, 1), folder=folder)
    masks, weights, ids = step.masks, step.weights, step.rollout_ids
    gradients = {}
    for aggregation in AGGREGATIONS:
        model, _ = place.model(aggregation, torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        for i, mask in enumerate(masks):
            batch = pack_micro_batch(
                {"tokens": step.tokens, "loss_masks": step.loss_masks},
                np.array([i]),
                place.rules(torch.float64),
            )
            logits = model(
                batch.tokens_1T, batch.positions_1T, None, packed_seq_params=batch.stream
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


def _difference(gradient: dict[str, Array], reference: dict[str, Array]) -> float:
    """||g - g'|| / ||g|| over all tensors."""
    assert gradient.keys() == reference.keys()
    square = sum(float(np.square(gradient[name] - reference[name]).sum()) for name in reference)
    return float(
        (square / sum(float(np.square(array).sum()) for array in reference.values())) ** 0.5
    )


def _of_writer(results: list[Result]) -> tuple[dict[str, Array], float]:
    """The gradient (one rank has it) and the loss (ranks of the last stage agree on it)."""
    (gradient,) = [gradient for gradient, _ in results if gradient is not None]
    (value,) = {value for _, value in results if value is not None}
    return gradient, value


def _size_for(mesh: Mesh) -> int:
    return 3 if 3 in mesh[2:] else 4


@pytest.fixture(scope="session")
def one_process(run_ranks: RunRanks, model_folders: dict[int, Path], step: Step) -> OneProcess:
    def of_model(
        size: int,
    ) -> dict[tuple[torch.dtype, Aggregation, str], tuple[dict[str, Array], float]]:
        (results,) = run_ranks(
            1,
            lambda rank, rendezvous: _steps_gradients(
                rank,
                rendezvous,
                size=size,
                mesh=(1, 1, 1, 1),
                folder=model_folders[size],
                step=step,
                scales={"right": _right_scale},
            ),
        )
        return {key: _of_writer([result]) for key, result in results.items()}

    return {size: of_model(size) for size in model_folders}


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_one_process_is_that_of_the_formula(
    run_ranks: RunRanks,
    model_folders: dict[int, Path],
    step: Step,
    one_process: OneProcess,
    size: int,
) -> None:
    (formula,) = run_ranks(
        1,
        lambda rank, rendezvous: _formula(
            rank, rendezvous, size=size, folder=model_folders[size], step=step
        ),
    )
    for aggregation, (gradient, value) in formula.items():
        ours, reported = one_process[size][torch.float64, aggregation, "right"]
        assert reported == pytest.approx(value, rel=1e-6)
        assert _difference(ours, gradient) <= 1e-6


@pytest.mark.parametrize("mesh", MESHES, ids=_mesh_name)
def test_gradients_are_those_of_one_process(
    run_ranks: RunRanks,
    model_folders: dict[int, Path],
    step: Step,
    one_process: OneProcess,
    mesh: Mesh,
) -> None:
    size = _size_for(mesh)
    ranks = run_ranks(
        int(np.prod(mesh)),
        lambda rank, rendezvous: _steps_gradients(
            rank,
            rendezvous,
            size=size,
            mesh=mesh,
            folder=model_folders[size],
            step=step,
            scales={"right": _right_scale},
        ),
    )
    for (dtype, aggregation, name), (reference, expected) in one_process[size].items():
        gradient, value = _of_writer([results[dtype, aggregation, name] for results in ranks])
        difference = _difference(gradient, reference)
        print(
            f"{_mesh_name(mesh)} {str(dtype)[6:]} {aggregation}: gradient {difference:.1e}, loss"
            f" {abs(value / expected - 1):.1e}"
        )
        assert difference <= BOUNDS[dtype]
        assert value == pytest.approx(expected, rel=BOUNDS[dtype])


def test_one_wrong_factor_is_found(
    run_ranks: RunRanks, model_folders: dict[int, Path], step: Step, one_process: OneProcess
) -> None:
    mesh = (2, 2, 1, 1)
    ranks = run_ranks(
        4,
        lambda rank, rendezvous: _steps_gradients(
            rank,
            rendezvous,
            size=4,
            mesh=mesh,
            folder=model_folders[4],
            step=step,
            scales=WRONG_SCALES,
        ),
    )
    for aggregation, name in itertools.product(AGGREGATIONS, WRONG_SCALES):
        gradient, value = _of_writer(
            [results[torch.float64, aggregation, name] for results in ranks]
        )
        reference, expected = one_process[4][torch.float64, aggregation, "right"]
        assert _difference(gradient, reference) > 1e-3, (aggregation, name)
        assert value == pytest.approx(expected, rel=1e-6), (
            "the reported loss does not depend on the scale"
        )
