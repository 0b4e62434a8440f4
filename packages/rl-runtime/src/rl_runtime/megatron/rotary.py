"""Rotary position embeddings for packed sequences, all sequences in one call.

Megatron-Core's unfused packed RoPE loops over sequences in Python, eight times a layer and pass;
short samples make that the largest cost of a CPU step. Here the angles are looked up once per
micro-batch by position id, and queries and keys are rotated with one multiply-add each.

Axes: T local tokens, H heads, D width of a head.

Equation (Su et al. 2021, "RoFormer", eq. 34; halves instead of pairs, as in Llama and Qwen):

    y = x * cos(p * f) + rotate_half(x) * sin(p * f)
    f_i = theta ** (-2i / d),   rotate_half([a, b]) = [-b, a]
"""

from __future__ import annotations

import math

import torch

from rl_runtime.megatron.shape import LLAMA3_SCALING, ModelShape

__all__ = ["apply_rotary", "rotary_angles", "rotary_frequencies"]


def rotary_frequencies(shape: ModelShape) -> torch.Tensor:
    """Return the angular frequency of each pair of dimensions.

    Llama 3's scaling (Llama 3.1 model card; Dubey et al. 2024, section 3.4): wavelengths above 8192
    tokens are stretched by the factor, those below 2048 are kept, those between are interpolated.

    Returns:
        float32 [head_dim / 2], radians per token. For head_dim 4 and theta 100: [1.0, 0.1].
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies: torch.Tensor = 1.0 / (shape.rope_theta**exponents)
    if shape.rope_scaling_factor is None:
        return frequencies
    low, high, positions = LLAMA3_SCALING.values()
    # Turns that a pair makes over the original context: at most `low` is stretched, from `high` on
    # kept.
    turns = positions / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / shape.rope_scaling_factor + kept * frequencies


def rotary_angles(
    positions_T: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up the angles of positions.

    Args:
        positions_T: int64 [T], position of each token in its own sequence.
        frequencies: from `rotary_frequencies`, on the same device.

    Returns:
        Cosines and sines, float32 [T, 1, D] each.
    """
    # float32: angles of far positions have no digits left in half precision.
    angles = torch.outer(positions_T.to(torch.float32), frequencies)
    # Both halves of a head turn by the same angles, and all heads alike.
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def apply_rotary(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys.

    Args:
        x_THD: [T, heads, head_dim], any float dtype.
        cos_T1D: float32 [T, 1, head_dim].
        sin_T1D: float32 [T, 1, head_dim].

    Returns:
        The rotated tensor in the dtype of `x_THD`; computed in float32.
    """
    x = x_THD.float()
    low, high = x.chunk(2, dim=-1)
    return (x * cos_T1D + torch.cat([-high, low], dim=-1) * sin_T1D).to(x_THD.dtype)
