"""One trainer rank: a Megatron-Core model, its optimizer, and what can be done with them.

A plain class without any knowledge of actors. Every method is a collective: all ranks call it, in
the same order, with their own part of the data.

Life: construct; any number of `train_sft_step`; `start_reinforcement` once; any number of
`train_batch`; `export_weights` and `save_hf` at any time between; `close`.

Invariants: no step starts before all ranks agree on the batch; old log-probs are under the weights
that the batch began with; reports are equal on every rank.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rl_runtime.batch.rank_batch import Column, RankBatch
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import TrainerError
from rl_runtime.algorithms.advantages import spread_rewards
from rl_runtime.training.same_batch_check import check_same_batch
from rl_runtime.training.micro_batch import MicroBatch, PackingRules, local_values, pack_micro_batch
from rl_runtime.megatron.cpu_shim import install_device_shim
from rl_runtime.training.scores import ScoreName
from rl_runtime.megatron.model import build_model, megatron_config, wrap_for_training
from rl_runtime.megatron.shape import ModelShape, read_model_config
from rl_runtime.megatron.optimizer import AdamSettings, TrainerOptimizer
from rl_runtime.megatron.parallel_state import end_process_groups, start_process_groups
from rl_runtime.training.forward_backward import run_scoring_pass, run_training_pass
from rl_runtime.training.objective import policy_scores, reference_score, reinforcement_loss
from rl_runtime.training.step_metrics import finish_report
from rl_runtime.megatron.rotary import RotaryTable
from rl_runtime.training.sft import pack_examples, supervised_aggregation, supervised_loss
from rl_runtime.training.dump import TrainDumper
from rl_runtime.weights.convert import export_hf_tensors, load_hf_weights, save_hf_folder

__all__ = ["Trainer"]

_log = logging.getLogger(__name__)


class Trainer:
    """One rank of the trainers."""

    def __init__(
        self, recipe: Recipe, *, rank: int, world_size: int, rendezvous: str, model_folder: Path
    ) -> None:
        """Join the other ranks, build this rank's part of the model and load its weights.

        Args:
            recipe: the whole recipe.
            rank: this rank.
            world_size: number of ranks; the product of `[parallel]`.
            rendezvous: "host:port" where rank 0 listens.
            model_folder: folder in Hugging Face layout.

        Raises:
            RuntimeSetupError: the folder is missing something or holds a model that the trainer
                does not know.
            ConfigError: an axis does not divide the model, or `[megatron]` has a field it must not
                have.
        """
        self._recipe = recipe
        self._model_folder = model_folder
        self._shape = ModelShape.from_hf_config(read_model_config(model_folder))
        self._config = megatron_config(self._shape, recipe)
        if install_device_shim():
            torch.set_num_threads(recipe.cluster.threads_per_trainer)
        self._deadline_seconds = recipe.cluster.actor_timeout_seconds
        self._topology = start_process_groups(
            recipe.parallel,
            rank=rank,
            world_size=world_size,
            rendezvous=rendezvous,
            timeout_seconds=self._deadline_seconds,
        )
        self._model = self._load_model(model_folder)
        self._wrapped = wrap_for_training(self._model, self._config)
        self._optimizer: TrainerOptimizer | None = None
        self._reference: torch.nn.Module | None = None
        self._in_reinforcement = False
        self._dumper = TrainDumper(recipe, self._topology)
        self._rules = PackingRules(
            cp=self._topology.context_parallel,
            tp_size=self._topology.tp_size,
            vocab_size=self._shape.vocab_size,
            rotary=RotaryTable(self._shape, self._topology.device),
            device=self._topology.device,
            dtype=self._config.params_dtype,
            use_kept_sets=recipe.rollout.replay,
        )

    @property
    def data_parallel_rank(self) -> int:
        """Which part of a batch this rank trains on."""
        return self._topology.dp_rank

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes dumps and exports weights."""
        return self._topology.is_writer

    def train_sft_step(self, batch: Mapping[str, Column], lr: float) -> dict[str, float]:
        """Take one optimizer step of supervised fine-tuning, token mean.

        Args:
            batch: `tokens` int64 [L] and `loss_masks` int32 [R] of this data-parallel rank's
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
        optimizer = self._supervised_optimizer()
        started = time.perf_counter()
        cap = self._recipe.train.max_tokens_per_gpu * self._topology.cp_size
        micro_batches, trained_tokens = pack_examples(batch, cap, self._rules, self._topology)
        aggregation = supervised_aggregation(per_token=self._config.calculate_per_token_loss)
        loss = supervised_loss(
            aggregation=aggregation,
            num_microbatches=len(micro_batches),
            trained_tokens=trained_tokens,
            topology=self._topology,
        )
        optimizer.zero_grad()
        metrics = run_training_pass(
            self._wrapped,
            micro_batches,
            loss,
            temperature=1.0,
            wanted=frozenset(),
            tp_group=self._topology.tp_group,
        )
        grad_norm = optimizer.step(lr)
        return finish_report(
            metrics,
            aggregation=aggregation,
            step_units=trained_tokens,
            topology=self._topology,
            prefix="warm_start",
            seconds=time.perf_counter() - started,
            values={"grad_norm": grad_norm, "lr": lr},
        )

    def start_reinforcement(self) -> None:
        """Begin with reinforcement learning: empty optimizer moments, and a frozen reference where
        the recipe wants a KL term.

        Raises:
            TrainerError: it was called before.
        """
        if self._in_reinforcement:
            raise TrainerError("start_reinforcement was called twice")
        section = self._recipe.optimizer
        self._renew_optimizer(
            AdamSettings(
                beta1=section.beta1,
                beta2=section.beta2,
                eps=section.eps,
                weight_decay=section.weight_decay,
                clip_grad=section.clip_grad,
            )
        )
        if self._recipe.algorithm.kl_coef > 0:
            self._reference = self._make_reference()
        self._in_reinforcement = True

    def train_batch(self, batch: RankBatch, lr: float) -> list[dict[str, float]]:
        """Train on one rollout batch.

        Args:
            batch: this data-parallel rank's part.
            lr: learning rate of all its steps.

        Returns:
            One report per step, equal on every rank; names are listed in `reports`.

        Raises:
            BatchMismatchError: ranks hold different batches.
            TrainerError: `start_reinforcement` was not called, the plan has several steps under
                `reuse`, or a gradient is not finite.
            WriteError: the train dump of an earlier batch could not be written.
        """
        if not self._in_reinforcement:
            raise TrainerError("train_batch before start_reinforcement")
        self._dumper.check()
        check_same_batch(batch, self._topology)
        steps = len(batch.plan.num_microbatches)
        if self._recipe.algorithm.old_log_probs == "reuse" and steps > 1:
            raise TrainerError(
                f"batch {batch.batch_id} has {steps} steps, but algorithm.old_log_probs = 'reuse'"
                " is right for one step only: use 'recompute'"
            )
        micro_batches = self._pack(batch)
        self._score_before_training(micro_batches)
        reports = []
        parts = iter(micro_batches)
        for count, units in zip(batch.plan.num_microbatches, batch.step_units, strict=True):
            reports.append(
                self._policy_step(list(itertools.islice(parts, count)), float(units), lr)
            )
        self._dumper.write(batch, micro_batches)
        return reports

    def score(self, columns: Mapping[str, Column]) -> npt.NDArray[np.float32]:
        """Score all samples of some columns in one micro-batch, without gradients, as `train_batch`
        does before its first step.

        Args:
            columns: `tokens` and `loss_masks`; kept sets where they are recorded.

        Returns:
            float32 [K]: log-probs of this rank's response tokens, sample by sample; empty where it
                does not hold the last pipeline stage.
        """
        part = pack_micro_batch(columns, np.arange(len(columns["tokens"])), self._rules)
        self._score(self._wrapped, [part], {"log_probs": "log_probs"})
        return part.fields.get("log_probs", torch.empty(0)).cpu().numpy()

    def export_weights(self) -> dict[str, npt.NDArray[np.generic]] | None:
        """Collect all weights under Hugging Face names.

        Returns:
            Full arrays on the writer rank (bfloat16 weights as float32, which holds them exactly),
            None elsewhere.
        """
        tensors = export_hf_tensors(self._model, self._shape, self._topology)
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
        tensors = export_hf_tensors(self._model, self._shape, self._topology)
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

    def _load_model(self, folder: Path) -> torch.nn.Module:
        model = build_model(self._shape, self._config, self._topology)
        load_hf_weights(model, folder, self._shape, self._topology)
        return model

    def _renew_optimizer(self, settings: AdamSettings) -> TrainerOptimizer:
        if self._optimizer is None:
            self._optimizer = TrainerOptimizer(
                self._wrapped, settings, dtype=self._config.params_dtype
            )
        else:
            self._optimizer.reset(settings)
        return self._optimizer

    def _supervised_optimizer(self) -> TrainerOptimizer:
        if self._optimizer is not None:
            return self._optimizer
        section, warm_start = self._recipe.optimizer, self._recipe.warm_start
        return self._renew_optimizer(
            AdamSettings(
                beta1=section.beta1,
                beta2=warm_start.beta2,
                eps=section.eps,
                weight_decay=warm_start.weight_decay,
                clip_grad=section.clip_grad,
            )
        )

    def _make_reference(self) -> torch.nn.Module:
        path = self._recipe.model.reference_path
        reference = build_model(self._shape, self._config, self._topology)
        if path:
            _check_same_shape(self._shape, Path(path))
            load_hf_weights(reference, Path(path), self._shape, self._topology)
        else:
            reference.load_state_dict(self._model.state_dict())
        return reference.requires_grad_(requires_grad=False)

    def _pack(self, batch: RankBatch) -> list[MicroBatch]:
        lengths = np.asarray(batch.columns["response_lengths"])
        advantages = spread_rewards(np.asarray(batch.columns["rewards"]), lengths)
        micro_batches = [
            pack_micro_batch(batch.columns, samples, self._rules)
            for samples in batch.plan.micro_batch_indices
        ]
        for part in micro_batches:
            part.fields["advantages"] = part.fields["returns"] = local_values(advantages, part)
        return micro_batches

    def _score_before_training(self, micro_batches: Sequence[MicroBatch]) -> None:
        if self._recipe.algorithm.old_log_probs == "recompute":
            self._score(
                self._wrapped,
                micro_batches,
                {name: name for name in policy_scores(self._recipe.algorithm)},
            )
        if self._reference is not None:
            self._score(
                self._reference,
                micro_batches,
                {"ref_log_probs": reference_score(self._recipe.algorithm)},
            )

    def _score(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[MicroBatch],
        fields: Mapping[str, ScoreName],
    ) -> None:
        run_scoring_pass(
            model,
            micro_batches,
            temperature=self._recipe.rollout.temperature,
            tp_group=self._topology.tp_group,
            fields=fields,
        )

    def _policy_step(
        self, micro_batches: list[MicroBatch], step_units: float, lr: float
    ) -> dict[str, float]:
        assert self._optimizer is not None
        started = time.perf_counter()
        loss = reinforcement_loss(
            self._recipe.algorithm,
            num_microbatches=len(micro_batches),
            step_units=step_units,
            topology=self._topology,
        )
        self._optimizer.zero_grad()
        metrics = run_training_pass(
            self._wrapped,
            micro_batches,
            loss,
            temperature=self._recipe.rollout.temperature,
            wanted=policy_scores(self._recipe.algorithm),
            tp_group=self._topology.tp_group,
        )
        grad_norm = self._optimizer.step(lr)
        return finish_report(
            metrics,
            aggregation=self._recipe.algorithm.loss_aggregation,
            step_units=step_units,
            topology=self._topology,
            prefix="train",
            seconds=time.perf_counter() - started,
            values={"grad_norm": grad_norm, "lr": lr},
        )


def _check_same_shape(shape: ModelShape, folder: Path) -> None:
    other = ModelShape.from_hf_config(read_model_config(folder))
    if other != shape:
        raise TrainerError(
            f"model.reference_path {folder}: its shape {other} differs from the policy's {shape}"
        )
