"""Entries scored one dot product each: the way for small kept sets, in plain torch.

A product of two dense matrices sampled at given places (SDDMM), chunk by
chunk. Invariants: memory is bounded by the chunk; sums run in entry order on CPU, so results repeat
bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_topp.lm_head.operands import Operands
from rl_topp.lm_head.weight_gradient import Destinations
from rl_topp.nucleus import NucleusSet
from rl_topp.torch.entries import Entries, build_entries, segment_statistics
from rl_topp.torch.scores import Upstream, entry_gradient

__all__ = ["SparseScores", "add_gradients", "score_rows"]

_CHUNK_BYTES = 16 * 2**20
"""Bound on one gathered operand; more does not run faster on a CPU, whose caches hold less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseScores:
    """What forward keeps for backward."""

    entries: Entries
    z_E: Tensor
    """Logit / temperature per entry; -inf where the id counts nowhere."""


def score_rows(
    operands: Operands, rows: NucleusSet, listed_rows: npt.NDArray[np.int64], statistics_4T: Tensor
) -> SparseScores:
    """Score the kept ids of the listed rows, and write their statistics.

    Args:
        operands: of the call.
        rows: kept sets of the T rows.
        listed_rows: int64 [R], ascending; each has status 0.
        statistics_4T: [4, T], the computing dtype; written at the listed rows.
    """
    hidden_TH, weight_VH, dtype = operands.hidden_TH, operands.weight_VH, operands.dtype
    entries = build_entries(
        rows,
        listed_rows,
        operands.targets_T,
        vocab_start=operands.vocab_start,
        num_local_ids=operands.num_local_ids,
    )
    z_E = torch.full(entries.ids_E.shape, -torch.inf, dtype=dtype, device=operands.device)
    for places, call_rows, ids in _chunks(entries, operands):
        z_E[places] = (hidden_TH[call_rows].to(dtype) * weight_VH[ids].to(dtype)).sum(dim=1)
    z_E.div_(operands.temperature)
    statistics_4T[:, entries.rows_R] = segment_statistics(entries, z_E)
    return SparseScores(entries=entries, z_E=z_E)


def add_gradients(
    scored: SparseScores, operands: Operands, upstream: Upstream, destinations: Destinations
) -> None:
    """Add the gradients of the listed rows' scores.

    Args:
        scored: what `score_rows` returned.
        operands: those that it was given.
        upstream: of the T rows' main scores.
        destinations: where they go.
    """
    entries, dtype = scored.entries, operands.dtype
    coefficients_E = entry_gradient(
        scored.z_E, entries.is_target_E, upstream.at(entries.call_rows_E)
    ).div_(operands.temperature)
    used, place_of_kept = torch.unique(entries.ids_E[entries.ids_E >= 0], return_inverse=True)
    for_hidden, for_weight = (
        torch.zeros(count, operands.width, dtype=dtype, device=operands.device)
        for count in (entries.rows_R.numel(), used.numel())
    )
    done = 0
    for places, call_rows, ids in _chunks(entries, operands):
        coefficients = coefficients_E[places, None]
        if destinations.hidden is not None:
            for_hidden.index_add_(
                0, entries.segments_E[places], operands.weight_VH[ids].to(dtype) * coefficients
            )
        if destinations.weight is not None:
            for_weight.index_add_(
                0,
                place_of_kept[done : done + ids.numel()],
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
        places, max(1, _CHUNK_BYTES // (operands.width * operands.dtype.itemsize))
    ):
        yield chunk, call_rows[chunk], entries.ids_E[chunk]
