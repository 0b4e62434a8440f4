"""A whole recipe: its sections and what must hold between them.

Invariants: what cannot be honoured is an error here, before anything starts.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from rl_runtime.config.algorithm import AlgorithmSection
from rl_runtime.config.base import Section
from rl_runtime.config.cluster import ClusterSection
from rl_runtime.config.rollout import DataSection, EngineSection, RewardSection, RolloutSection
from rl_runtime.config.run import (
    DebugSection,
    DumpSection,
    EvalSection,
    RunSection,
    TrackingSection,
)
from rl_runtime.config.training import (
    ModelSection,
    OptimizerSection,
    ParallelSection,
    TrainSection,
    WarmStartSection,
)

__all__ = ["Recipe"]


class Recipe(Section):
    """Everything that defines a run."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection = Field(default_factory=ModelSection)
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    train: TrainSection = Field(default_factory=TrainSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    data: DataSection = Field(default_factory=DataSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    warm_start: WarmStartSection = Field(default_factory=WarmStartSection)
    dump: DumpSection = Field(default_factory=DumpSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    debug: DebugSection = Field(default_factory=DebugSection)
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of Megatron-Core's TransformerConfig, passed through."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """SGLang server arguments, passed through: {"page_size": 16} becomes --page-size 16."""

    @model_validator(mode="after")
    def _check_between_sections(self) -> Self:
        rollouts = self.rollout.prompts_per_batch * self.rollout.rollouts_per_prompt
        if rollouts < self.train.global_batch_size and self.train.on_trailing != "partial_step":
            raise ValueError(
                f"train.global_batch_size = {self.train.global_batch_size} rollouts, but a batch"
                f" has only {rollouts} (rollout.prompts_per_batch * rollout.rollouts_per_prompt):"
                " lower it, or set train.on_trailing = 'partial_step'"
            )
        if self.algorithm.old_log_probs == "reuse" and rollouts > self.train.global_batch_size:
            raise ValueError(
                f"algorithm.old_log_probs = 'reuse' needs one step per batch, but {rollouts}"
                " rollouts make more than one step of train.global_batch_size ="
                f" {self.train.global_batch_size}: use 'recompute'"
            )
        if self.debug.rollout_only and self.debug.load_rollout_dump:
            raise ValueError(
                "debug.rollout_only and debug.load_rollout_dump exclude each other: set one of them"
            )
        return self
