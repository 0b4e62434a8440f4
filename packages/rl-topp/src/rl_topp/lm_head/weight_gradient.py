"""Where the output weight's gradient goes: a new tensor, or Megatron-Core's float32 `main_grad`.

Axes: V_local ids of the shard, T rows of the call, H inner dimension.

Invariant: `main_grad` is only added to, and only where a gradient exists; what is added may be
wider than the buffer, and the sum is rounded once.
"""

# Megatron's protocol: a layer that adds to `weight.main_grad` itself sets
# `weight.grad_added_to_main_grad` and still returns a tensor of the weight's shape, so that the
# data-parallel hook of the weight runs; the hook then ignores what was returned, unless
# `weight.zero_out_wgrad` says that another layer (the tied embedding) adds its own gradient to it,
# in which case it must be zeros.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Destinations", "WeightGradient"]


class WeightGradient:
    """Destination of the weight's gradient in one backward pass, by Megatron's protocol."""

    def __init__(self, weight: Tensor, *, use_main_grad: bool) -> None:
        """Look for `main_grad` on `weight`, else allocate zeros like it.

        Args:
            weight: [V_local, H].
            use_main_grad: False = always a new tensor.
        """
        main_grad = (
            getattr(weight, "main_grad", None)
            if use_main_grad and hasattr(weight, "grad_added_to_main_grad")
            else None
        )
        self._weight = weight
        self.in_main_grad = main_grad is not None
        """Whether `buffer` is Megatron's."""
        self.buffer: Tensor = torch.zeros_like(weight) if main_grad is None else main_grad
        """[V_local, H]: add to it."""

    def add_block(self, first: int, block: Tensor) -> None:
        """Add `block` [B, H] to the rows from `first` on."""
        self.buffer[first : first + block.shape[0]] += block

    def add_rows(self, ids: Tensor, values: Tensor) -> None:
        """Add `values` [U, H] to the rows `ids` [U], each named once."""
        self.buffer[ids] += values

    def finish(self) -> Tensor:
        """Return what the autograd function returns for the weight."""
        if not self.in_main_grad:
            return self.buffer
        self._weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        allocate = (
            torch.zeros_like if getattr(self._weight, "zero_out_wgrad", False) else torch.empty_like
        )
        return allocate(self._weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """Places for the gradients of one backward pass; both are added to, None = not wanted."""

    hidden: Tensor | None
    """[T, H], in the dtype of the hidden states."""
    weight: WeightGradient | None
    """[V_local, H], a new tensor or `main_grad`."""
