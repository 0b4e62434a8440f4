"""The model's last stage without logits: Megatron-Core's own numbers and gradients.

No tensor has the size of logits.

`_score_from_logits` is the other way to the same scores: Megatron-Core's output layer is called,
and rl-topp reads the ids of the nucleus out of its logits.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from safetensors.numpy import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from rl_dump import RaggedArray
from rl_metrics import MicroBatchMetrics
from rl_runtime.config.recipe import Recipe
from rl_runtime.megatron.cpu_shim import install_cpu_shim
from rl_runtime.megatron.model import build_model, megatron_config
from rl_runtime.megatron.parallel_state import end_process_groups, start_process_groups
from rl_runtime.megatron.shape import ModelShape
from rl_runtime.training import forward_backward
from rl_runtime.training.micro_batch import MicroBatch, MicroBatchPacker
from rl_runtime.training.scores import ResponseScores, ScoreName, score_responses
from rl_runtime.training.trainer import Trainer
from rl_runtime.weights.convert import load_hf_weights
from rl_topp.torch import nucleus_log_probs

if TYPE_CHECKING:
    from distributed.conftest import Batch, MakeRecipe, RunRanks

Array = npt.NDArray[np.floating[Any]]

pytestmark = pytest.mark.distributed

VOCAB_SIZE = 4_097
"""So large that logits are the largest tensor by far; odd, so that two tensor ranks pad it."""
NUM_SAMPLES, PROMPT, RESPONSE = 4, 6, 50
TOKEN_CAP = 2 * (PROMPT + RESPONSE)
"""Two samples in each micro-batch."""
TEMPERATURE = 0.7
ALL_SCORES: tuple[ScoreName, ...] = ("log_probs", "entropy", "full_log_probs", "full_entropy")
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one process": ({"data": 1}, {}),
    "tensor 2": ({"data": 1, "tensor": 2}, {}),
    "tensor 2, sequence parallel": ({"data": 1, "tensor": 2}, {"sequence_parallel": True}),
    "pipeline 2": ({"data": 1, "pipeline": 2}, {}),
}


def _score_from_logits(
    *,
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    micro_batch: MicroBatch,
    temperature: float,
    wanted: AbstractSet[ScoreName],
    tp_group: dist.ProcessGroup,
    **_: Any,
) -> ResponseScores:
    logits_T1V, _bias = output_layer(hidden_states, weight=output_weight)
    logits_KV = logits_T1V[micro_batch.rows_K].squeeze(1)
    scores = nucleus_log_probs(
        logits_KV,
        micro_batch.targets_K,
        micro_batch.nucleus,
        vocab_start=dist.get_rank(tp_group) * logits_KV.shape[1],
        tp_group=tp_group,
        temperature=temperature,
        full_log_probs="full_log_probs" in wanted,
        entropy="entropy" in wanted,
        full_entropy="full_entropy" in wanted,
    )
    return ResponseScores(
        log_probs=scores.log_probs,
        entropy=scores.entropy,
        full_log_probs=scores.full_log_probs,
        full_entropy=scores.full_entropy,
        anchor=logits_KV.new_zeros(()),
    )


@pytest.fixture(scope="session")
def large_vocabulary(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Path]:
    """The tiny model with many more ids, by whether its output weight is the embedding."""
    generator = np.random.default_rng(1)
    folders = {}
    for tied in (True, False):
        folder = folders[tied] = tmp_path_factory.mktemp("large") / "model"
        shutil.copytree(model_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "vocab_size": VOCAB_SIZE, "tie_word_embeddings": tied})
        )
        weights = load_file(folder / "model.safetensors")
        for name in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied):
            weights[name] = (
                0.2 * generator.standard_normal((VOCAB_SIZE, config["hidden_size"]))
            ).astype(np.float32)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folders


@pytest.fixture(scope="session")
def long_batch(batch: Batch) -> Batch:
    """Samples with ids of the whole vocabulary; every second one has tokens of every kind."""
    generator = np.random.default_rng(2)
    status = np.zeros((NUM_SAMPLES, RESPONSE), np.uint8)
    status[1::2] = generator.integers(0, 4, status[1::2].shape)
    tokens = generator.integers(0, VOCAB_SIZE, (NUM_SAMPLES, PROMPT + RESPONSE))
    sets: list[list[Any]] = [
        [
            (
                generator.choice(VOCAB_SIZE, generator.integers(1, 12), replace=False)
                if kind in (0, 3)
                else []
            )
            for kind in row
        ]
        for row in status
    ]
    columns: dict[str, Any] = {
        "tokens": tokens,
        "loss_masks": np.isin(status, (0, 1)),
        "rollout_log_probs": -generator.random(status.shape),
        "nucleus_ids": [np.concatenate(row) for row in sets],
        "nucleus_offsets": [np.cumsum([0, *map(len, row)]) for row in sets],
        "nucleus_status": status,
    }
    numbers = np.arange(NUM_SAMPLES)
    scalars = {
        **dict.fromkeys(("rollout_position", "sample_index", "rollout_ids"), numbers),
        "group_ids": numbers // 2,
        "total_lengths": np.full(NUM_SAMPLES, PROMPT + RESPONSE),
        "response_lengths": np.full(NUM_SAMPLES, RESPONSE),
        "rewards": generator.standard_normal(NUM_SAMPLES),
        "raw_reward": generator.random(NUM_SAMPLES),
        "loss_denominators": np.isin(status, (0, 1)).sum(axis=1).astype(np.float32),
    }
    ragged = {
        name: RaggedArray.from_list(list(columns[name]), batch.ragged[name].dtype)
        for name in batch.ragged
    }
    return dataclasses.replace(batch, ragged=ragged, scalars=scalars)


class _LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation returns, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0
        self.shape: tuple[int, ...] = ()
        self.saw_backward = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.saw_backward |= "embedding_dense_backward" in str(func)
        for value in torch.utils._pytree.tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.numel() > self.numel:
                self.numel, self.shape = value.numel(), tuple(value.shape)
        return out


def _largest_of_a_batch(
    run_ranks: RunRanks, recipe: Recipe, folder: Path, batch: Batch, processor: Any
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of the largest tensors of one step of fine-tuning, and of one batch, by rank.

    A batch is a scoring pass and a training step.
    """

    def rank_main(rank: int, rendezvous: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward_backward, "score_responses", processor)
            trainer = Trainer(
                recipe,
                rank=rank,
                world_size=recipe.parallel.world_size,
                rendezvous=rendezvous,
                model_folder=folder,
            )
            with _LargestTensor() as sft:
                trainer.train_sft_step(
                    {name: batch.ragged[name] for name in ("tokens", "loss_masks")}, 1e-4
                )
            trainer.start_reinforcement()
            with _LargestTensor() as reinforced:
                trainer.train_batch(
                    batch.rank_batch(recipe, 0, global_batch_size=NUM_SAMPLES, token_cap=TOKEN_CAP),
                    1e-4,
                )
            trainer.close()
        assert sft.saw_backward
        assert reinforced.saw_backward
        return sft.shape, reinforced.shape

    return run_ranks(recipe.parallel.world_size, rank_main)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", ["one process", "tensor 2", "tensor 2, sequence parallel"])
@pytest.mark.parametrize(
    "algorithm",
    [{}, {"kl_coef": 0.1, "full_scores": True}],
    ids=["nuclei", "full scores and a reference"],
)
def test_no_tensor_of_tokens_times_vocabulary_exists_in_training_nor_in_log_prob_forward_backward(
    algorithm: dict[str, Any],
    layout: str,
    tied: bool,
    run_ranks: RunRanks,
    make_recipe: MakeRecipe,
    large_vocabulary: dict[bool, Path],
    long_batch: Batch,
    tmp_path: Path,
) -> None:
    parallel, megatron = LAYOUTS[layout]
    recipe = make_recipe(
        tmp_path / "run",
        parallel,
        megatron=megatron,
        algorithm=algorithm,
        rollout={"temperature": TEMPERATURE},
    )
    ids = VOCAB_SIZE // recipe.parallel.tensor
    # Elements of the logits of one micro-batch's response tokens on one rank: all samples in the
    # step of fine-tuning, two of them in the others.
    limits = (NUM_SAMPLES * RESPONSE * ids, 2 * RESPONSE * ids)
    for found in _largest_of_a_batch(
        run_ranks, recipe, large_vocabulary[tied], long_batch, score_responses
    ):
        assert [np.prod(shape) < limit for shape, limit in zip(found, limits, strict=True)] == [
            True,
            True,
        ], found
    # The same measurement trips over logits where there are some.
    for found in _largest_of_a_batch(
        run_ranks, recipe, large_vocabulary[tied], long_batch, _score_from_logits
    ):
        assert [np.prod(shape) < limit for shape, limit in zip(found, limits, strict=True)] == [
            False,
            False,
        ], found


def _main_grad(parameter: Any) -> Array:
    gradient: torch.Tensor = parameter.main_grad
    return gradient.numpy().copy()


def _scores_and_gradients(
    rank: int, rendezvous: str, *, recipe: Recipe, folder: Path, batch: Batch, dtype: torch.dtype
) -> list[tuple[dict[str, Array], dict[str, Array]]]:
    """Scores of all tokens (on the last stage) and all gradients, without logits and from them."""
    install_cpu_shim()
    topology = start_process_groups(
        recipe.parallel,
        rank=rank,
        world_size=recipe.parallel.world_size,
        rendezvous=rendezvous,
        timeout_seconds=100,
    )
    shape = ModelShape.of_folder(folder)
    config = megatron_config(shape, recipe)
    config.params_dtype = dtype
    config.pipeline_dtype = dtype  # type: ignore[attr-defined]
    model = build_model(shape, config, topology)
    load_hf_weights(model, folder, shape, topology)
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=dtype == torch.float32), model
    )
    packer = MicroBatchPacker(shape, topology, dtype=dtype, use_nucleus=True)
    # Two micro-batches, so that the second one's gradient is added to the first one's.
    micro_batches = [
        packer.pack(batch.columns, samples) for samples in (np.array([0, 1]), np.array([2, 3]))
    ]
    found = []
    for processor in (score_responses, _score_from_logits):
        scores: dict[str, Array] = {}

        def loss(
            micro_batch: MicroBatch, given: ResponseScores, scores: dict[str, Array] = scores
        ) -> Any:
            total = given.log_probs.new_zeros(())
            for seed, name in enumerate(ALL_SCORES):
                scores[f"{name} of {micro_batch.samples.tolist()}"] = given[name].detach().numpy()
                weights = torch.randn(
                    micro_batch.targets_K.numel(),
                    generator=torch.Generator().manual_seed(seed),
                    dtype=given[name].dtype,
                )
                total = total + (weights * given[name]).sum()
            return total, MicroBatchMetrics(sums={}, num_tokens=micro_batch.num_trained_tokens)

        wrapped.zero_grad_buffer()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward_backward, "score_responses", processor)
            forward_backward.run_training_pass(
                wrapped,
                micro_batches,
                loss,
                aggregation=recipe.algorithm.loss_aggregation,
                temperature=TEMPERATURE,
                wanted=set(ALL_SCORES),
                tp_group=topology.tp_group,
            )
        found.append(
            (scores, {name: _main_grad(parameter) for name, parameter in model.named_parameters()})
        )
    end_process_groups()
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_all_gradients_are_those_of_the_logits(
    layout: str,
    tied: bool,
    dtype: torch.dtype,
    tolerance: float,
    run_ranks: RunRanks,
    make_recipe: MakeRecipe,
    large_vocabulary: dict[bool, Path],
    long_batch: Batch,
    tmp_path: Path,
) -> None:
    parallel, megatron = LAYOUTS[layout]
    recipe = make_recipe(tmp_path / "run", parallel, megatron=megatron)
    results = run_ranks(
        recipe.parallel.world_size,
        lambda rank, rendezvous: _scores_and_gradients(
            rank,
            rendezvous,
            recipe=recipe,
            folder=large_vocabulary[tied],
            batch=long_batch,
            dtype=dtype,
        ),
    )
    for (scores, gradients), (expected_scores, expected_gradients) in results:
        assert scores.keys() == expected_scores.keys()
        for name, score in scores.items():
            np.testing.assert_allclose(score, expected_scores[name], atol=tolerance, rtol=tolerance)
        for name, gradient in gradients.items():
            scale = np.linalg.norm(expected_gradients[name])
            assert scale > 0
            assert np.linalg.norm(gradient - expected_gradients[name]) <= tolerance * scale, name
    assert any(scores for (scores, _), _ in results)
