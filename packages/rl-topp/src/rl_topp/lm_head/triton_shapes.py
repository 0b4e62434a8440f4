"""Tile sizes of the head's CUDA kernels, and the dtypes that they sum in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

__all__ = ["WIDE", "KernelShapes"]

WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}
"""Dtype of Triton by the computing dtype of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShapes:
    """Tile sizes, powers of two.

    The defaults are the fastest of benchmarks/gpu_lm_head.py `--tune` on one H200.
    """

    score_entries: int = 4
    """Entries per program in forward."""
    score_block: int = 256
    """Elements of the inner dimension per step in forward."""
    hidden_entries: int = 1
    """Entries per step of a row's hidden-state gradient."""
    hidden_block: int = 1024
    """Elements per program of it."""
    weight_entries: int = 1
    """Entries per step of the weight's gradient."""
    weight_block: int = 1024
    """Elements per program of it."""
    weight_span: int = 4
    """Sorted entries per program of it: the program owns the ids whose runs begin there."""
    chunk: int = 64
    """Sorted entries per partial sum of the weight's gradient; a multiple of `weight_entries`."""
