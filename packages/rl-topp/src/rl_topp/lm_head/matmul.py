"""Matrix products [M, K] @ [K, N] that sum and return at least float32, whatever the inputs.

Invariant: no operand is rounded and no product between product and sum, on any device. Before torch
2.8, whose `torch.mm` cannot return another dtype than its operands', they are widened first; that
takes more memory and time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_topp.torch.scores import compute_dtype

__all__ = ["wide_matmul"]

_RETURNS_WIDE = torch.__version__ >= "2.8"  # a `TorchVersion`, which compares by number


def wide_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32 (float64 for float64 operands).

    Args:
        left: [M, K], the dtype of `right`, or float32 beside bfloat16.
        right: [K, N].
    """
    wide = compute_dtype(right.dtype)
    if right.dtype == wide or not right.is_cuda or not _RETURNS_WIDE:
        return left.to(wide) @ right.to(wide)
    if left.dtype == wide:
        # Two bfloat16 terms hold 16 bits of it; their products and sums are exact to float32.
        high = left.to(right.dtype)
        left = torch.cat([high, (left - high).to(right.dtype)], dim=1)
        right = torch.cat([right, right])
    # Tensor cores on the narrow operands, float32 sums kept.
    return torch.mm(left, right, out_dtype=wide)
