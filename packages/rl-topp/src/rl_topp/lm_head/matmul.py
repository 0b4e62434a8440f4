"""Matrix products that accumulate and return at least float32, whatever the inputs.

Layer: torch. Invariant: bfloat16 operands are never rounded between product and sum, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_topp.torch.scores import compute_dtype

__all__ = ["wide_matmul"]


def wide_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32 (float64 for float64 operands).

    Args:
        left: [M, K].
        right: [K, N], same dtype.
    """
    wide = compute_dtype(left.dtype)
    if left.dtype == wide:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=wide)  # tensor cores on the narrow operands, float32 sums kept
    return left.to(wide) @ right.to(wide)
