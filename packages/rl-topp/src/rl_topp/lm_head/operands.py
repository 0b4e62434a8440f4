"""What every way of scoring a call works on.

Invariant: the same in forward and backward of one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_topp.torch.scores import compute_dtype

__all__ = ["Operands"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Hidden states, one shard of the output weight, and the targets."""

    hidden_TH: Tensor
    """[T, H]."""
    weight_VH: Tensor
    """[V_local, H]; rows from `num_local_ids` on are padding."""
    targets_T: Tensor
    """Integers [T], ids of the whole vocabulary."""
    vocab_start: int
    """First id of the shard."""
    num_local_ids: int
    """Ids of the shard."""
    temperature: float
    """Divisor of the logits."""

    @property
    def dtype(self) -> torch.dtype:
        """The computing dtype."""
        return compute_dtype(self.hidden_TH.dtype)

    @property
    def device(self) -> torch.device:
        """Where all tensors lie."""
        return self.hidden_TH.device

    @property
    def width(self) -> int:
        """H."""
        return self.hidden_TH.shape[1]
