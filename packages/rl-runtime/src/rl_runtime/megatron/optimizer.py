"""Megatron-Core's optimizer with a learning rate that is set step by step.

The learning-rate schedule is not here: it is per batch, which only the loop counts.

Invariants: every step uses exactly the learning rate it was given; the gradient norm is that of all
ranks, before clipping, and is reported whether or not gradients are clipped; norms and biases are
not decayed.
"""

from __future__ import annotations

import math

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer

from rl_runtime.config.training import OptimizerSection
from rl_runtime.errors import TrainerError
from rl_runtime.megatron.calls import MegatronOptimizer

__all__ = ["TrainerOptimizer"]


class TrainerOptimizer:
    """One model's optimizer."""

    def __init__(
        self, model: torch.nn.Module, section: OptimizerSection, *, dtype: torch.dtype
    ) -> None:
        """Make an optimizer with empty moments; weights stay as they are.

        Args:
            model: the model in its data-parallel wrapper.
            section: Adam's settings; its learning rates are not used.
            dtype: dtype of the weights; bfloat16 weights get float32 master copies.
        """
        self._model = model
        self._section = section
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            min_lr=0.0,
            adam_beta1=section.beta1,
            adam_beta2=section.beta2,
            adam_eps=section.eps,
            weight_decay=section.weight_decay,
            clip_grad=section.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
        )
        self._optimizer: MegatronOptimizer = get_megatron_optimizer(
            config, [model], use_gloo_process_groups=False
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
            # Both are the work of Megatron-Core's own scheduler, which is not used here.
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._section.weight_decay * group.get("wd_mult", 1.0)
        # The parts of the optimizer's `step`: the norm is wanted before clipping, and before the
        # weights change.
        overflow = self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        if overflow or not math.isfinite(grad_norm):
            raise TrainerError(
                f"the gradient norm is {grad_norm}; the weights were not changed: look at the"
                " losses and log-probs of this batch"
            )
        if self._section.clip_grad:
            # Looked up in its module: the CPU shim replaces it there.
            megatron_optimizer.clip_grad_by_total_norm_fp32(
                self._optimizer.get_parameters(), self._section.clip_grad, grad_norm
            )
        self._optimizer.step_with_ready_grads()
        return grad_norm
