"""Megatron-Core's optimizer with a learning rate that is set step by step.

The learning-rate schedule is not here: it is counted in rollouts, which only the loop knows.

Invariants: every step uses exactly the learning rate it was given; the gradient norm is that of all
ranks, before clipping, and is reported whether or not gradients are clipped; norms and biases are
not decayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer

from rl_runtime.errors import TrainerError

__all__ = ["AdamSettings", "TrainerOptimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """Adam's settings, apart from the learning rate."""

    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Added to the denominator."""
    weight_decay: float
    """Decoupled weight decay."""
    clip_grad: float
    """Largest gradient norm; 0: not clipped."""


class TrainerOptimizer:
    """One model's optimizer."""

    def __init__(
        self, model: torch.nn.Module, settings: AdamSettings, *, dtype: torch.dtype
    ) -> None:
        """Make an optimizer with empty moments.

        Args:
            model: the model in its data-parallel wrapper.
            settings: Adam's settings.
            dtype: dtype of the weights; bfloat16 weights get float32 master copies.
        """
        self._model = model
        self._dtype = dtype
        self.reset(settings)

    def reset(self, settings: AdamSettings) -> None:
        """Start again with empty moments and other settings; weights stay."""
        self._settings = settings
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            min_lr=0.0,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip_grad,
            bf16=self._dtype == torch.bfloat16,
            params_dtype=self._dtype,
        )
        self._optimizer = get_megatron_optimizer(
            config, [self._model], use_gloo_process_groups=False
        )

    def zero_grad(self) -> None:
        """Clear gradients and the buffers they are reduced in."""
        self._model.zero_grad_buffer()  # type: ignore[operator]
        self._optimizer.zero_grad()

    def step(self, lr: float) -> float:
        """Update the weights.

        Args:
            lr: learning rate of this step.

        Returns:
            Gradient norm over all ranks, before clipping.

        Raises:
            TrainerError: the gradient norm is not finite; weights are left as they were.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._settings.weight_decay * group.get("wd_mult", 1.0)
        optimizer = self._optimizer
        overflow = optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        if overflow or not math.isfinite(grad_norm):
            raise TrainerError(
                f"the gradient norm is {grad_norm}; the weights were not changed: look at the"
                " losses and log-probs of this batch"
            )
        if self._settings.clip_grad:
            megatron_optimizer.clip_grad_by_total_norm_fp32(
                optimizer.get_parameters(), self._settings.clip_grad, grad_norm
            )
        optimizer.step_with_ready_grads()
        return grad_norm
