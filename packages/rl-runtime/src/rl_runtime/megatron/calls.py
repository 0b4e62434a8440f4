"""The few calls that we make to Megatron-Core, typed.

Megatron-Core has no type information, so its names are `Any` to a type checker. Whatever comes out
of it is held by one of these protocols at once, and our side is checked from there on.

Invariants: every member here exists in the tested Megatron-Core under the same name; nothing here
is imported by it or imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

__all__ = ["ForwardBackward", "GptForward", "MegatronOptimizer", "ModelConfig", "OutputLayer"]


class ModelConfig(Protocol):
    """What we read of a `TransformerConfig`."""

    params_dtype: torch.dtype
    """Dtype of weights."""
    bf16: bool
    """Whether weights are bfloat16."""
    sequence_parallel: bool
    """Whether activations outside of the tensor-parallel region are split over tokens."""
    calculate_per_token_loss: bool
    """Whether Megatron-Core divides by the number of trained tokens itself."""
    attention_dropout: float
    """Always 0 here."""
    kv_channels: int
    """Width of one head."""


class OutputLayer(Protocol):
    """What we read of a `ColumnParallelLinear` that makes logits."""

    weight: torch.Tensor
    """[V / tp, H], this rank's rows."""
    sequence_parallel: bool
    """Whether its input is split over tokens."""


class GptForward(Protocol):
    """A `GPTModel`, wrapped or not, as it is called."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: object,
        output_processor: Callable[..., object],
    ) -> object:
        """Run one forward pass: hidden states, or on the last stage what the processor returns."""
        ...


class ForwardBackward(Protocol):
    """What `get_forward_backward_func` returns."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[
            [Iterator[Any], GptForward], tuple[object, Callable[..., object]]
        ],
        data_iterator: Iterator[Any],
        model: list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool,
        collect_non_loss_data: bool,
    ) -> list[Any]:
        """Run all micro-batches; gives what their loss functions report, on the last stage."""
        ...


class MegatronOptimizer(Protocol):
    """What `get_megatron_optimizer` returns."""

    param_groups: list[dict[str, Any]]
    """Torch's parameter groups, with `lr_mult` and `wd_mult`."""

    def zero_grad(self) -> None:
        """Clear gradients."""

    def prepare_grads(self) -> bool:
        """Bring gradients to the main weights; gives whether one is infinite."""
        ...

    def get_grad_norm(self) -> float:
        """Return the norm over all ranks."""
        ...

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """Return the main weights."""
        ...

    def step_with_ready_grads(self) -> bool:
        """Update the weights; gives whether that went well."""
        ...
