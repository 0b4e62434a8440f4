"""`[algorithm]`: advantages and loss."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rl_runtime.config.base import Section

__all__ = ["AlgorithmSection"]


class AlgorithmSection(Section):
    """Advantages and loss."""

    name: Literal["grpo", "dr_grpo"] = "grpo"
    """grpo: group-normalised rewards divided by the group's standard deviation.

    dr_grpo: not divided.
    """

    loss_aggregation: Literal["token_mean", "sample_mean", "rollout_mean", "prompt_mean"] = (
        "rollout_mean"
    )
    """What one unit of weight in the loss is."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""

    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the reference policy (k3 estimator) in the loss.

    0: no reference policy is loaded.
    """

    kl_log_probs: Literal["auto", "kept_set", "full"] = "auto"
    """Which log-probs of policy and reference the KL term compares.

    kept_set: both normalised over the policy's kept set, the distribution that was sampled. full:
    both over the vocabulary; needs `full_scores`. auto: full where `full_scores` is on, else
    kept_set.
    """

    full_scores: bool = False
    """Also score every sampled token over the whole vocabulary, beside its kept set.

    Log-probs and entropies are in the train dump, the entropy in the report. Costs the time of an
    output layer without a filter, and still forms no logits.
    """

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss."""

    old_log_probs: Literal["recompute", "reuse", "rollout"] = "recompute"
    """Denominator of the ratio.

    recompute: a forward pass of the trainer before the first step. reuse: the first training
    forward of each sample (only with one step per batch). rollout: the engine's log-probs.
    """

    @property
    def kl_is_full(self) -> bool:
        """Whether the KL term compares log-probs over the vocabulary."""
        return self.full_scores if self.kl_log_probs == "auto" else self.kl_log_probs == "full"

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl_log_probs == "full" and not self.full_scores:
            raise ValueError(
                "algorithm.kl_log_probs = 'full' needs algorithm.full_scores = true: set it, or use"
                " 'kept_set'"
            )
        if self.kl_log_probs != "auto" and not self.kl_coef:
            raise ValueError(
                f"algorithm.kl_log_probs = {self.kl_log_probs!r} is set, but algorithm.kl_coef = 0"
                " has no KL term: set kl_coef, or leave it out"
            )
        return self
