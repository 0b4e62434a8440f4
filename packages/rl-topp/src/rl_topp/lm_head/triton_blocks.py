# Kernel arguments are device pointers and scalars, for which Python has no types; what each
# launcher takes is typed below.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""CUDA kernels over blocks of logits: one pass for forward's statistics, one for the gradient.

Axes: D rows of a block of B ids, F of them over the whole vocabulary (see `kernels.Kernels`).

Invariants: a block of logits is read once per pass and never copied; sums run in the logits' dtype
(float32 or float64), in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_topp.torch.scores import Upstream

__all__ = ["block_gradient", "merge_block_statistics"]

_BLOCK = 1024
"""Columns a program handles at a time."""


@triton.jit(do_not_specialize=["num_full", "first_id"])
def _merge_statistics_kernel(
    z, places, targets, statistics, num_full, first_id, width, BLOCK: tl.constexpr
):
    full = tl.program_id(0)
    source = z + tl.load(places + full).to(tl.int64) * width
    out = statistics + full
    peak = tl.load(out)
    mass = tl.load(out + 2 * num_full)
    spread = tl.load(out + 3 * num_full)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(source + column, mask=column < width, other=float("-inf"))
        # Sums so far are rescaled to the new maximum; -inf - -inf would be NaN, hence the guards.
        higher = tl.maximum(peak, tl.max(value, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shift = tl.where(mass > 0, peak - base, 0.0)
        scale = tl.where(mass > 0, tl.exp(shift), 0.0)
        distance = value - base
        part = tl.exp(distance)
        spread = (spread + shift * mass) * scale + tl.sum(
            tl.where(part > 0, part * distance, 0.0), axis=0
        )
        mass = mass * scale + tl.sum(part, axis=0)
        peak = higher
    tl.store(out, peak)
    tl.store(out + 2 * num_full, mass)
    tl.store(out + 3 * num_full, spread)
    column_of_target = tl.load(targets + full).to(tl.int64) - first_id
    if (column_of_target >= 0) & (column_of_target < width):
        tl.store(out + num_full, tl.load(source + column_of_target))


@triton.jit(do_not_specialize=["first_id"])
def _gradient_kernel(
    z,
    full_of_row,
    targets,
    upstream,
    upstream_entropy,
    log_normaliser,
    entropy,
    out,
    first_id,
    width,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = row.to(tl.int64) * width + column
    full = tl.load(full_of_row + row)
    if full < 0:
        tl.store(out + place, tl.zeros((BLOCK,), out.dtype.element_ty), mask=inside)
    else:
        log_p = tl.load(z + place, mask=inside, other=float("-inf")) - tl.load(
            log_normaliser + full
        )
        p = tl.exp(log_p)
        is_target = column == tl.load(targets + full).to(tl.int64) - first_id
        value = tl.load(upstream + full) * (tl.where(is_target, 1.0, 0.0) - p)
        if WITH_ENTROPY:
            value -= tl.load(upstream_entropy + full) * tl.where(
                p > 0, p * (log_p + tl.load(entropy + full)), 0.0
            )
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def merge_block_statistics(
    z_DB: Tensor, places_F: Tensor, targets_F: Tensor, statistics_4F: Tensor, *, first_id: int
) -> None:
    """Merge one block into running statistics, in place."""
    num_full = places_F.numel()
    _merge_statistics_kernel[(num_full,)](
        z_DB, places_F, targets_F, statistics_4F, num_full, first_id, z_DB.shape[1], BLOCK=_BLOCK
    )


def block_gradient(
    z_DB: Tensor,
    places_F: Tensor,
    targets_F: Tensor,
    full: Upstream,
    *,
    first_id: int,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return dL/d(logit) of one block, [D, B]; 0 in rows not over the whole vocabulary."""
    out = torch.empty(z_DB.shape, dtype=dtype, device=z_DB.device)
    full_of_row_D = torch.full((z_DB.shape[0],), -1, dtype=torch.int32, device=z_DB.device)
    full_of_row_D[places_F] = torch.arange(places_F.numel(), dtype=torch.int32, device=z_DB.device)
    score = full.score / temperature
    grid = (z_DB.shape[0], triton.cdiv(z_DB.shape[1], _BLOCK))
    _gradient_kernel[grid](
        z_DB,
        full_of_row_D,
        targets_F,
        score,
        score if full.entropy is None else full.entropy / temperature,
        full.log_normaliser,
        full.entropy_value,
        out,
        first_id,
        z_DB.shape[1],
        WITH_ENTROPY=full.entropy is not None,
        BLOCK=_BLOCK,
    )
    return out
