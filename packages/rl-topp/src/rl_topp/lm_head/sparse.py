"""Entries scored one dot product each: the way for small kept sets, in plain torch.

Layer: torch; CUDA takes `triton_kernels` instead. A product of two dense matrices sampled at given places (SDDMM), chunk by chunk. Invariants: memory is
bounded by the chunk; sums run in entry order on CPU, so results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_topp.lm_head.weight_gradient import Destinations
from rl_topp.torch.entries import Entries
from rl_topp.torch.scores import compute_dtype

__all__ = ["sparse_gradients", "sparse_scores"]

_CHUNK_BYTES = 16 * 2**20
"""Bound on one gathered operand; more does not run faster on a CPU, whose caches hold less."""


def sparse_scores(hidden_TH: Tensor, weight_VH: Tensor, entries: Entries) -> Tensor:
    """Return hidden . weight[id] per entry, [E], in the computing dtype; -inf where the id counts nowhere.

    Args:
        hidden_TH: [T, H].
        weight_VH: [V_local, H].
        entries: E entries over rows of `hidden_TH` and `weight_VH`.
    """
    dtype = compute_dtype(hidden_TH.dtype)
    scores = torch.full(entries.ids_E.shape, -torch.inf, dtype=dtype, device=hidden_TH.device)
    for places, rows, ids in _chunks(entries, hidden_TH.shape[1], dtype):
        scores[places] = (hidden_TH[rows].to(dtype) * weight_VH[ids].to(dtype)).sum(dim=1)
    return scores


def sparse_gradients(hidden_TH: Tensor, weight_VH: Tensor, entries: Entries, coefficients_E: Tensor, destinations: Destinations) -> None:
    """Add the gradients of sum(coefficients * scores).

    Args:
        hidden_TH: [T, H].
        weight_VH: [V_local, H].
        entries: the entries scored.
        coefficients_E: dL/d(score) per entry, [E].
        destinations: where they go.
    """
    dtype, width = coefficients_E.dtype, hidden_TH.shape[1]
    kept = entries.ids_E[entries.ids_E >= 0]
    used, place_of_kept = torch.unique(kept, return_inverse=True)
    for_hidden = torch.zeros(entries.rows_R.numel(), width, dtype=dtype, device=kept.device)
    for_weight = torch.zeros(used.numel(), width, dtype=dtype, device=kept.device)
    done = 0
    for places, rows, ids in _chunks(entries, width, dtype):
        coefficients = coefficients_E[places, None]
        if destinations.hidden is not None:
            for_hidden.index_add_(0, entries.segments_E[places], weight_VH[ids].to(dtype) * coefficients)
        if destinations.weight is not None:
            for_weight.index_add_(0, place_of_kept[done : done + ids.numel()], hidden_TH[rows].to(dtype) * coefficients)
        done += ids.numel()
    if destinations.hidden is not None:
        destinations.hidden[entries.rows_R] += for_hidden.to(destinations.hidden.dtype)
    if destinations.weight is not None:
        destinations.weight.add_rows(used, for_weight)


def _chunks(entries: Entries, width: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (entry numbers, rows of the call, ids) of the entries that count here, in order."""
    places = torch.nonzero(entries.ids_E >= 0)[:, 0]
    call_rows = entries.call_rows_E
    for chunk in torch.split(places, max(1, _CHUNK_BYTES // (width * dtype.itemsize))):
        yield chunk, call_rows[chunk], entries.ids_E[chunk]
