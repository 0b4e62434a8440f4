"""One trainer rank: a Megatron-Core model, its optimizer, and what can be done with them.

A plain class without any knowledge of actors. Every method is a collective: all ranks call it, in
the same order, with their own share of the data.

Life: construct; any number of `train_sft_step`; `start_reinforcement` once; any number of
`train_batch`; `export_weights` and `save_hf` at any time between; `close`.

Invariants: no step starts before all ranks agree on the batch; old log-probs are under the weights
that the batch began with; reports are equal on every rank.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rl_runtime.algorithms.advantages import spread_rewards
from rl_runtime.batch.rank_batch import Column, RankBatch
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import TrainerError
from rl_runtime.megatron.cpu_shim import install_cpu_shim
from rl_runtime.megatron.model import megatron_config
from rl_runtime.megatron.parallel_state import end_process_groups, start_process_groups
from rl_runtime.megatron.shape import ModelShape
from rl_runtime.training.dump import TrainDumper
from rl_runtime.training.forward_backward import run_scoring_pass
from rl_runtime.training.micro_batch import MicroBatch, MicroBatchPacker
from rl_runtime.training.objective import (
    policy_objective,
    policy_scores,
    reference_score,
    sft_objective,
)
from rl_runtime.training.roles import Policy, load_reference
from rl_runtime.training.same_batch_check import check_same_batch
from rl_runtime.training.sft import pack_examples, sft_aggregation
from rl_runtime.weights.convert import export_hf_tensors, save_hf_folder

__all__ = ["Trainer"]


class Trainer:
    """One rank of the trainers; `topology` is its place in the mesh."""

    def __init__(
        self, recipe: Recipe, *, rank: int, world_size: int, rendezvous: str, model_folder: Path
    ) -> None:
        """Join the other ranks, build this rank's share of the model and load its weights.

        Args:
            recipe: the whole recipe.
            rank: this rank.
            world_size: number of ranks; the product of `[parallel]`.
            rendezvous: "host:port" where rank 0 listens.
            model_folder: folder in Hugging Face layout.

        Raises:
            RuntimeSetupError: the folder lacks something, or holds a model of an unknown kind.
            ConfigError: an axis does not divide the model, or `[megatron]` has a wrong field.
        """
        self._recipe = recipe
        self._model_folder = model_folder
        self._shape = ModelShape.of_folder(model_folder)
        self._config = megatron_config(self._shape, recipe)
        if install_cpu_shim():
            torch.set_num_threads(recipe.cluster.threads_per_trainer)
        self.topology = start_process_groups(
            recipe.parallel,
            rank=rank,
            world_size=world_size,
            rendezvous=rendezvous,
            timeout_seconds=recipe.cluster.actor_timeout_seconds,
        )
        self._policy = Policy(model_folder, self._shape, self._config, self.topology)
        self._reference: torch.nn.Module | None = None
        self._in_reinforcement = False
        self._dumper = TrainDumper(recipe, self.topology)
        self._packer = MicroBatchPacker(
            self._shape,
            self.topology,
            dtype=self._config.params_dtype,
            use_nucleus=recipe.rollout.replay,
        )
        self._score = partial(
            run_scoring_pass,
            temperature=recipe.rollout.temperature,
            tp_group=self.topology.tp_group,
        )

    def train_sft_step(self, columns: Mapping[str, Column], lr: float) -> dict[str, float]:
        """Take one optimizer step of the warm start, token mean.

        Args:
            columns: `tokens` int64 [L] and `loss_masks` int32 [R] of this data-parallel rank's
                examples; the R last tokens are the response.
            lr: learning rate.

        Returns:
            `warm_start/{loss,grad_norm,lr,tokens_per_second}`, equal on every rank.

        Raises:
            TrainerError: reinforcement has started, no token is trained, or the gradient is not
                finite.
        """
        if self._in_reinforcement:
            raise TrainerError(
                "train_sft_step after start_reinforcement: the warm start comes first"
            )
        warm_start = self._recipe.warm_start
        if self._policy.optimizer is None:
            changed = {"beta2": warm_start.beta2, "weight_decay": warm_start.weight_decay}
            self._policy.renew_optimizer(self._recipe.optimizer.model_copy(update=changed))
        started = time.perf_counter()
        micro_batches, trained_tokens = pack_examples(
            columns,
            self._recipe.train.max_tokens_per_gpu * self.topology.cp_size,
            self._packer,
            self.topology,
        )
        aggregation = sft_aggregation(per_token=self._config.calculate_per_token_loss)
        objective = sft_objective(
            aggregation,
            num_microbatches=len(micro_batches),
            trained_tokens=trained_tokens,
            topology=self.topology,
        )
        return self._policy.step(
            micro_batches,
            objective,
            aggregation=aggregation,
            step_units=trained_tokens,
            lr=lr,
            started=started,
            prefix="warm_start",
        )

    def start_reinforcement(self) -> None:
        """Begin with reinforcement learning.

        Optimizer moments are emptied, and where the recipe wants a KL term a frozen reference is
        made.

        Raises:
            TrainerError: it was called before.
        """
        if self._in_reinforcement:
            raise TrainerError("start_reinforcement was called twice")
        self._policy.renew_optimizer(self._recipe.optimizer)
        if self._recipe.algorithm.kl_coef > 0:
            path = self._recipe.model.reference_path
            self._reference = load_reference(self._policy, Path(path) if path else None)
        self._in_reinforcement = True

    def train_batch(self, rank_batch: RankBatch, lr: float) -> list[dict[str, float]]:
        """Train on one rollout batch: check, pack, score, step by step, dump.

        Args:
            rank_batch: this data-parallel rank's share.
            lr: learning rate of all its steps.

        Returns:
            One report per step, equal on every rank; names are listed in `step_metrics`.

        Raises:
            BatchMismatchError: ranks hold different batches.
            TrainerError: `start_reinforcement` was not called, the plan has several steps under
                `reuse`, or a gradient is not finite.
            WriteError: the train dump of an earlier batch could not be written.
        """
        self._check(rank_batch)
        micro_batches = self._pack(rank_batch)
        self._score_before_training(micro_batches)
        queue = iter(micro_batches)
        reports = [
            self._policy_step(list(itertools.islice(queue, count)), float(step_units), lr)
            for count, step_units in zip(
                rank_batch.plan.num_microbatches, rank_batch.step_units, strict=True
            )
        ]
        self._dumper.write(rank_batch, micro_batches)
        return reports

    def _check(self, rank_batch: RankBatch) -> None:
        if not self._in_reinforcement:
            raise TrainerError("train_batch before start_reinforcement")
        self._dumper.check()
        check_same_batch(rank_batch, self.topology)
        steps = len(rank_batch.plan.num_microbatches)
        if self._recipe.algorithm.old_log_probs == "reuse" and steps > 1:
            raise TrainerError(
                f"batch {rank_batch.batch_id} has {steps} steps, but algorithm.old_log_probs ="
                " 'reuse' is right for one step only: use 'recompute'"
            )

    def _pack(self, rank_batch: RankBatch) -> list[MicroBatch]:
        columns = rank_batch.columns
        advantages = spread_rewards(
            np.asarray(columns["rewards"]), np.asarray(columns["response_lengths"])
        )
        micro_batches = [
            self._packer.pack(columns, samples) for samples in rank_batch.plan.micro_batch_indices
        ]
        for micro_batch in micro_batches:
            # Without a critic both are the same; the train dump has a field for each.
            local = micro_batch.local_values(advantages)
            micro_batch.fields["advantages"] = micro_batch.fields["returns"] = local
        return micro_batches

    def _score_before_training(self, micro_batches: Sequence[MicroBatch]) -> None:
        algorithm = self._recipe.algorithm
        if algorithm.old_log_probs == "recompute":
            self._score(
                self._policy.wrapped,
                micro_batches,
                fields={str(name): name for name in policy_scores(algorithm)},
            )
        if self._reference is not None:
            fields = {"ref_log_probs": reference_score(algorithm)}
            self._score(self._reference, micro_batches, fields=fields)

    def _policy_step(
        self, micro_batches: Sequence[MicroBatch], step_units: float, lr: float
    ) -> dict[str, float]:
        started = time.perf_counter()
        algorithm = self._recipe.algorithm
        objective = policy_objective(
            algorithm,
            num_microbatches=len(micro_batches),
            step_units=step_units,
            topology=self.topology,
        )
        return self._policy.step(
            micro_batches,
            objective,
            aggregation=algorithm.loss_aggregation,
            step_units=step_units,
            lr=lr,
            started=started,
            prefix="train",
            temperature=self._recipe.rollout.temperature,
            wanted=policy_scores(algorithm),
        )

    def score(self, columns: Mapping[str, Column]) -> npt.NDArray[np.float32]:
        """Score all samples of some columns in one micro-batch, as `train_batch` does at first.

        Args:
            columns: `tokens` and `loss_masks`; nuclei where they are recorded.

        Returns:
            float32 [K]: log-probs of this rank's response tokens, sample by sample; empty where it
                does not hold the last pipeline stage.
        """
        micro_batch = self._packer.pack(columns, np.arange(len(columns["tokens"])))
        self._score(self._policy.wrapped, [micro_batch], fields={"log_probs": "log_probs"})
        return micro_batch.fields.get("log_probs", torch.empty(0)).cpu().numpy()

    def export_weights(self) -> dict[str, npt.NDArray[np.generic]] | None:
        """Collect all weights under Hugging Face names.

        Returns:
            Full arrays on the writer rank (bfloat16 weights as float32, which holds them exactly),
            None elsewhere.
        """
        tensors = export_hf_tensors(self._policy.model, self._shape, self.topology)
        if tensors is None:
            return None
        return {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in tensors.items()
        }

    def save_hf(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, on the writer rank.

        Args:
            folder: replaced where it exists.
        """
        tensors = export_hf_tensors(self._policy.model, self._shape, self.topology)
        if tensors is not None:
            save_hf_folder(folder, tensors, self._model_folder)

    def close(self) -> None:
        """Finish pending dumps and leave the other ranks.

        Raises:
            WriteError: a train dump could not be written, or not in time.
        """
        try:
            self._dumper.close()
        finally:
            end_process_groups()
