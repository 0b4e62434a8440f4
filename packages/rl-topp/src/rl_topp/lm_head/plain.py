"""The arithmetic of the head in plain torch (see `kernels.Kernels` for what each function does).

Single entries are a product of two dense matrices sampled at given places (SDDMM), chunk by chunk.

Axes: T rows of the call, R listed rows, E entries, H inner dimension; D rows of a block of B ids, F
of them over the whole vocabulary.

Invariants: memory is bounded by the chunk; sums run in entry order on CPU, so results repeat bit
for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_topp.lm_head.operands import Operands
from rl_topp.lm_head.weight_gradient import Destinations
from rl_topp.torch.dense_rows import block_statistics, merge_statistics
from rl_topp.torch.entries import Entries, segment_statistics
from rl_topp.torch.scores import Upstream, entry_gradient

__all__ = ["add_gradients", "block_gradient", "merge_block_statistics", "score_rows"]

_CHUNK_BYTES = 16 * 2**20
"""Bound on one gathered operand; more does not run faster on a CPU, whose caches hold less."""


def score_rows(
    operands: Operands, listed_rows: npt.NDArray[np.int64], statistics_4T: Tensor
) -> tuple[Entries, Tensor]:
    """Score the kept ids of the listed rows, one dot product each; write their statistics."""
    dtype = operands.dtype
    entries = operands.entries_of(listed_rows)
    z_E = torch.full(entries.ids_E.shape, -torch.inf, dtype=dtype, device=operands.device)
    for places, call_rows, ids in _chunks(entries, operands):
        left = operands.hidden_TH[call_rows].to(dtype)
        z_E[places] = (left * operands.weight_VH[ids].to(dtype)).sum(dim=1)
    z_E.div_(operands.call.temperature)
    statistics_4T[:, entries.rows_R] = segment_statistics(entries, z_E)
    return entries, z_E


def add_gradients(
    entries: Entries,
    z_E: Tensor,
    operands: Operands,
    upstream: Upstream,
    destinations: Destinations,
) -> None:
    """Add the gradients of the listed rows' scores."""
    dtype, segments_E = operands.dtype, entries.segments_E
    coefficients_E = entry_gradient(
        z_E, entries.is_target_E, upstream.at(entries.call_rows_E)
    ).div_(operands.call.temperature)
    # Sums stand in rows of their own, one per id that occurs, and reach the weight's gradient once.
    used, place_of_id = torch.unique(entries.ids_E[entries.ids_E >= 0], return_inverse=True)
    for_hidden, for_weight = (
        torch.zeros(count, operands.hidden_TH.shape[1], dtype=dtype, device=operands.device)
        for count in (entries.rows_R.numel(), used.numel())
    )
    done = 0
    for places, call_rows, ids in _chunks(entries, operands):
        coefficients = coefficients_E[places, None]
        if destinations.hidden is not None:
            for_hidden.index_add_(
                0, segments_E[places], operands.weight_VH[ids].to(dtype) * coefficients
            )
        if destinations.weight is not None:
            for_weight.index_add_(
                0,
                place_of_id[done : done + ids.numel()],
                operands.hidden_TH[call_rows].to(dtype) * coefficients,
            )
        done += ids.numel()
    if destinations.hidden is not None:
        destinations.hidden[entries.rows_R] += for_hidden.to(destinations.hidden.dtype)
    if destinations.weight is not None:
        destinations.weight.add_rows(used, for_weight)


def _chunks(entries: Entries, operands: Operands) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (entry numbers, rows of the call, ids) of the entries that count here, in order."""
    places = torch.nonzero(entries.ids_E >= 0)[:, 0]
    call_rows = entries.call_rows_E
    for chunk in torch.split(
        places, max(1, _CHUNK_BYTES // (operands.hidden_TH.shape[1] * operands.dtype.itemsize))
    ):
        yield chunk, call_rows[chunk], entries.ids_E[chunk]


def merge_block_statistics(
    z_DB: Tensor, places_F: Tensor, targets_F: Tensor, statistics_4F: Tensor, *, first_id: int
) -> None:
    """Merge one block into running statistics, in place."""
    part = block_statistics(z_DB[places_F], targets_F, first_id=first_id)
    statistics_4F.copy_(merge_statistics(statistics_4F, part))


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
    gradient_DB = torch.zeros_like(z_DB, dtype=dtype)
    is_target = torch.arange(z_DB.shape[1], device=z_DB.device) == (targets_F - first_id)[:, None]
    gradient_DB[places_F] = (
        entry_gradient(z_DB[places_F], is_target, full.as_columns()).div_(temperature).to(dtype)
    )
    return gradient_DB
