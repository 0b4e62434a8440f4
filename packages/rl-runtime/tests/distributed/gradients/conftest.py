"""One step of a real GPTModel whose gradient every mesh must give, and how a mesh computes it.

The step holds what splits badly: three micro-batches on every rank, one of them a filler at dp 4;
rollouts of one to three siblings dealt to different ranks and micro-batches; masks with holes; a
rollout without trained tokens; a NaN loss at every masked position; responses that leave
context-parallel ranks without a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
from rl_runtime.megatron.calls import ModelConfig
from rl_runtime.megatron.cpu_shim import install_cpu_shim
from rl_runtime.megatron.model import build_model, megatron_config
from rl_runtime.megatron.parallel_state import end_process_groups, start_process_groups
from rl_runtime.megatron.shape import ModelShape
from rl_runtime.setup.tiny_model import write_tiny_model
from rl_runtime.training.forward_backward import run_training_pass
from rl_runtime.training.micro_batch import MicroBatch, MicroBatchPacker
from rl_runtime.training.scores import ResponseScores
from rl_runtime.weights.convert import export_hf_tensors, load_hf_weights

if TYPE_CHECKING:
    from distributed.conftest import RunRanks

Mesh = tuple[int, ...]
"""Sizes of the axes, in the order of `AXES`."""
Array = npt.NDArray[np.float64]
Key = tuple[torch.dtype, Aggregation, str]
"""dtype, aggregation, and the name of the scale."""
Result = tuple[dict[str, Array] | None, float | None]
"""Gradient under Hugging Face names, and the reported loss.

The first on the writer rank, the second on the last stage.
"""
Gradients = dict[Key, tuple[dict[str, Array], float]]
"""Gradient and loss of a whole mesh."""
Sizes = Mapping[str, Any]
Scale = Callable[[Aggregation, Sizes], float]

AXES = ("data", "context", "tensor", "pipeline")
AGGREGATIONS: tuple[Aggregation, ...] = ("rollout_mean", "token_mean")
NUM_MICRO_BATCHES = 3
# Three ranks on the tensor or pipeline axis need a model that three divides.
SIZES: dict[int, dict[str, int]] = {
    4: {"num_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
    3: {"num_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3},
}
COMMON = {"hidden_size": 24, "head_dim": 8, "intermediate_size": 36, "max_position_embeddings": 128}
VOCAB_SIZE = 88


def _right_scale(aggregation: Aggregation, sizes: Sizes) -> float:
    return megatron_loss_scale(aggregation, **sizes)


RIGHT: dict[str, Scale] = {"right": _right_scale}


def _recipe(size: int, mesh: Mesh, aggregation: Aggregation) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"dir": "unused"},
            "model": COMMON | SIZES[size],
            "parallel": dict(zip(AXES, mesh, strict=True)),
            "algorithm": {"loss_aggregation": aggregation},
        }
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


class Rank:
    """One rank's model and place."""

    def __init__(self, rank: int, rendezvous: str, *, size: int, mesh: Mesh, folder: Path) -> None:
        install_cpu_shim()
        recipe = _recipe(size, mesh, "rollout_mean")
        self.size, self.mesh, self.folder = size, mesh, folder
        self.topology = start_process_groups(
            recipe.parallel,
            rank=rank,
            world_size=int(np.prod(mesh)),
            rendezvous=rendezvous,
            timeout_seconds=100,
        )
        self.shape = ModelShape.of_folder(folder)

    def model(
        self, aggregation: Aggregation, dtype: torch.dtype
    ) -> tuple[torch.nn.Module, ModelConfig]:
        """This rank's part of the model with its weights, and its config."""
        config = megatron_config(self.shape, _recipe(self.size, self.mesh, aggregation))
        config.params_dtype = dtype
        config.pipeline_dtype = dtype  # type: ignore[attr-defined]
        model = build_model(self.shape, config, self.topology)
        load_hf_weights(model, self.folder, self.shape, self.topology)
        return model, config

    def packer(self, dtype: torch.dtype) -> MicroBatchPacker:
        """How micro-batches are packed."""
        return MicroBatchPacker(self.shape, self.topology, dtype=dtype, use_nucleus=False)


def _losses(
    micro_batch: MicroBatch,
    log_probs: torch.Tensor,
    weights: RaggedArray,
    flat: npt.NDArray[np.int64],
) -> torch.Tensor:
    """Per-token losses of a micro-batch's local tokens, NaN where masked."""
    whole = np.concatenate([np.empty(0), *(weights[i] for i in micro_batch.samples)])
    weight = torch.from_numpy(whole[flat]).to(log_probs.dtype)
    return -weight * log_probs + torch.where(micro_batch.trained_K, 0.0, torch.nan).to(
        log_probs.dtype
    )


def _gradient(
    place: Rank, step: Step, aggregation: Aggregation, dtype: torch.dtype, scale_of: Scale
) -> Result:
    topology, packer = place.topology, place.packer(dtype)
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
        packer.pack(columns, mine[k::NUM_MICRO_BATCHES]) for k in range(NUM_MICRO_BATCHES)
    ]
    sizes = {
        "num_microbatches": NUM_MICRO_BATCHES,
        "step_units": units,
        "dp_size": topology.dp_size,
        "cp_size": topology.cp_size,
    }

    def loss(
        micro_batch: MicroBatch, scores: ResponseScores
    ) -> tuple[torch.Tensor, MicroBatchMetrics]:
        reducer = loss_reducer(
            aggregation,
            micro_batch.total_lengths,
            micro_batch.response_lengths,
            micro_batch.loss_masks,
            denominators=micro_batch.denominators,
            cp=topology.context_parallel,
        )
        owned = packed_responses(
            micro_batch.total_lengths, micro_batch.response_lengths, topology.context_parallel
        )
        reduced = reducer(_losses(micro_batch, scores.log_probs, step.weights, owned.flat_indices))
        report = MicroBatchMetrics(
            sums={"loss": reduced.detach().clone()}, num_tokens=micro_batch.num_trained_tokens
        )
        return reduced * scale_of(aggregation, sizes), report

    wrapped.zero_grad_buffer()
    reports = run_training_pass(
        wrapped,
        micro_batches,
        loss,
        aggregation=aggregation,
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
) -> dict[Key, Result]:
    """Gradient and loss of every dtype and aggregation with every scale."""
    place = Rank(rank, rendezvous, size=size, mesh=mesh, folder=folder)
    try:
        return {
            (dtype, aggregation, name): _gradient(place, step, aggregation, dtype, scale_of)
            for dtype in (torch.float64, torch.float32)
            for aggregation in AGGREGATIONS
            for name, scale_of in scales.items()
            if dtype == torch.float64 or name == "right"
        }
    finally:
        end_process_groups()


def _of_writer(results: list[Result]) -> tuple[dict[str, Array], float]:
    """The gradient (one rank has it) and the loss (ranks of the last stage agree on it)."""
    (gradient,) = [gradient for gradient, _ in results if gradient is not None]
    (value,) = {value for _, value in results if value is not None}
    return gradient, value


class JoinMesh(Protocol):
    """Start a rank's process groups; give its place and model."""

    def __call__(
        self, rank: int, rendezvous: str, *, size: int, mesh: Mesh, folder: Path
    ) -> Rank: ...


class StepGradients(Protocol):
    """Gradient and loss of the step on a mesh, by every dtype, aggregation and scale."""

    def __call__(
        self, mesh: Mesh, *, size: int, scales: Mapping[str, Scale] = RIGHT
    ) -> Gradients: ...


@pytest.fixture(scope="session")
def join_mesh() -> JoinMesh:
    return Rank


@pytest.fixture(scope="session")
def step_gradients(
    run_ranks: RunRanks, model_folders: dict[int, Path], step: Step
) -> StepGradients:
    def run(mesh: Mesh, *, size: int, scales: Mapping[str, Scale] = RIGHT) -> Gradients:
        ranks = run_ranks(
            int(np.prod(mesh)),
            lambda rank, rendezvous: _steps_gradients(
                rank,
                rendezvous,
                size=size,
                mesh=mesh,
                folder=model_folders[size],
                step=step,
                scales=scales,
            ),
        )
        return {key: _of_writer([results[key] for results in ranks]) for key in ranks[0]}

    return run


@pytest.fixture(scope="session")
def one_process(step_gradients: StepGradients) -> dict[int, Gradients]:
    """Gradients and losses of one process, by the size of the model."""
    return {size: step_gradients((1, 1, 1, 1), size=size) for size in SIZES}


@pytest.fixture(scope="session")
def difference() -> Callable[[dict[str, Array], dict[str, Array]], float]:
    """||g - g'|| / ||g'|| over all tensors."""

    def norm(arrays: Mapping[str, Array]) -> float:
        return float(sum(float(np.square(array).sum()) for array in arrays.values()) ** 0.5)

    def of(gradient: dict[str, Array], reference: dict[str, Array]) -> float:
        assert gradient.keys() == reference.keys()
        return norm({name: gradient[name] - reference[name] for name in reference}) / norm(
            reference
        )

    return of
