"""`[algorithm]`: advantages and loss. Layer: config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["AlgorithmSection"]


class AlgorithmSection(Section):
    """Advantages and loss."""

    name: Literal["grpo", "dr_grpo"] = "grpo"
    """grpo: group-normalised rewards divided by the group's standard deviation. dr_grpo: not divided."""

    loss_aggregation: Literal["token_mean", "sample_mean", "rollout_mean", "prompt_mean"] = "rollout_mean"
    """What one unit of weight in the loss is."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""

    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the reference policy (k3 estimator) in the loss. 0: no reference policy is loaded."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss."""

    old_log_probs: Literal["recompute", "reuse", "rollout"] = "recompute"
    """Denominator of the ratio. recompute: a forward pass of the trainer before the first step. reuse: the first training
    forward of each sample (only with one step per batch). rollout: the engine's log-probs."""
