"""`[optimizer]`: Adam and its learning-rate schedule."""

from __future__ import annotations

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["OptimizerSection"]


class OptimizerSection(Section):
    """Megatron-Core's Adam and its learning-rate schedule, counted in rollouts."""

    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""

    min_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the run, as a fraction of `lr`; linear in between."""

    warmup_batches: int = Field(default=3, ge=0)
    """Batches over which the learning rate rises linearly from 0."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """Term added to the denominator."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""

    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm. 0: no clipping."""
