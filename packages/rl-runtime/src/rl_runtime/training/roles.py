"""The models of a trainer rank by their roles: the policy that is trained, and a frozen reference.

Invariants: a reference has the policy's shape and layout, and never a gradient; a step that fails
leaves the policy's weights as they were.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rl_metrics import Aggregation
from rl_runtime.config.training import OptimizerSection
from rl_runtime.errors import TrainerError
from rl_runtime.megatron.calls import ModelConfig
from rl_runtime.megatron.model import build_model, wrap_for_training
from rl_runtime.megatron.optimizer import TrainerOptimizer
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.megatron.shape import ModelShape
from rl_runtime.training.forward_backward import LossFunction, run_training_pass
from rl_runtime.training.micro_batch import MicroBatch
from rl_runtime.training.scores import ScoreName
from rl_runtime.training.step_metrics import step_report
from rl_runtime.weights.convert import load_hf_weights

__all__ = ["Policy", "load_reference"]


class Policy:
    """The model that is trained, and its optimizer."""

    def __init__(
        self, folder: Path, shape: ModelShape, config: ModelConfig, topology: Topology
    ) -> None:
        """Build this rank's share of the model in a folder, without an optimizer.

        Args:
            folder: folder in Hugging Face layout.
            shape: its shape.
            config: Megatron-Core's config.
            topology: this rank's place.

        Raises:
            RuntimeSetupError: a tensor is missing or has another shape than config.json says.
        """
        self.shape, self.config, self.topology = shape, config, topology
        self.model = build_model(shape, config, topology)
        load_hf_weights(self.model, folder, shape, topology)
        self.wrapped = wrap_for_training(self.model, config)
        self.optimizer: TrainerOptimizer | None = None

    def renew_optimizer(self, section: OptimizerSection) -> None:
        """Begin with empty moments."""
        self.optimizer = TrainerOptimizer(self.wrapped, section, dtype=self.config.params_dtype)

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: LossFunction,
        *,
        aggregation: Aggregation,
        step_units: float,
        lr: float,
        started: float,
        prefix: str,
        temperature: float = 1.0,
        wanted: frozenset[ScoreName] = frozenset(),
    ) -> dict[str, float]:
        """Take one optimizer step.

        Args:
            micro_batches: those of the step.
            objective: their loss.
            aggregation: how tokens become one number.
            step_units: units of the step over all ranks, by the aggregation.
            lr: learning rate.
            started: when the step began, on `time.perf_counter`.
            prefix: first part of the report's names.
            temperature: divisor of the logits.
            wanted: the scores that the objective reads, besides log-probs.

        Returns:
            The report, equal on every rank.

        Raises:
            TrainerError: the gradient is not finite.
        """
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        metrics = run_training_pass(
            self.wrapped,
            micro_batches,
            objective,
            aggregation=aggregation,
            temperature=temperature,
            wanted=wanted,
            tp_group=self.topology.tp_group,
        )
        grad_norm = self.optimizer.step(lr)
        return step_report(
            metrics,
            aggregation=aggregation,
            step_units=step_units,
            topology=self.topology,
            prefix=prefix,
            seconds=time.perf_counter() - started,
            values={"grad_norm": grad_norm, "lr": lr},
        )


def load_reference(policy: Policy, folder: Path | None) -> torch.nn.Module:
    """Build the frozen reference: a folder's model, or the policy as it is now.

    Args:
        policy: gives shape and layout.
        folder: folder in Hugging Face layout; None: a copy of the policy.

    Raises:
        RuntimeSetupError: as for `Policy`.
        TrainerError: the folder's model has another shape.
    """
    reference = build_model(policy.shape, policy.config, policy.topology)
    if folder is None:
        reference.load_state_dict(policy.model.state_dict())
    else:
        found = ModelShape.of_folder(folder)
        if found != policy.shape:
            raise TrainerError(
                f"model.reference_path {folder}: its shape {found} differs from the policy's"
                f" {policy.shape}"
            )
        load_hf_weights(reference, folder, policy.shape, policy.topology)
    return reference.requires_grad_(requires_grad=False)
