"""Entries scored one dot product each: the way for small kept sets, in plain torch.

Layer: torch; CUDA takes `sparse_cuda` instead, with the same two functions. A product of two dense matrices sampled at given places (SDDMM), chunk by chunk. Invariants: memory is
bounded by the chunk; sums run in entry order on CPU, so results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    rows: NucleusSet,
    listed_rows: npt.NDArray[np.int64],
    statistics_4T: Tensor,
    *,
    vocab_start: int,
    num_local_ids: int,
    temperature: float,
) -> SparseScores:
    """Score the kept ids of the listed rows, and write their statistics.

    Args:
        hidden_TH: [T, H].
        weight_VH: [V_local, H].
        targets_T: integers [T].
        rows: kept sets of the T rows.
        listed_rows: int64 [R], ascending; each has status 0.
        statistics_4T: [4, T], the computing dtype; written at the listed rows.
        vocab_start: first id of this shard.
        num_local_ids: ids of this shard.
        temperature: divisor of the logits.
    """
    entries = build_entries(rows, listed_rows, targets_T, vocab_start=vocab_start, num_local_ids=num_local_ids)
    z_E = torch.full(entries.ids_E.shape, -torch.inf, dtype=statistics_4T.dtype, device=hidden_TH.device)
    for places, call_rows, ids in _chunks(entries, hidden_TH.shape[1], z_E.dtype):
        z_E[places] = (hidden_TH[call_rows].to(z_E.dtype) * weight_VH[ids].to(z_E.dtype)).sum(dim=1)
    z_E.div_(temperature)
    statistics_4T[:, entries.rows_R] = segment_statistics(entries, z_E)
    return SparseScores(entries=entries, z_E=z_E)


def add_gradients(
    scored: SparseScores, hidden_TH: Tensor, weight_VH: Tensor, upstream: Upstream, destinations: Destinations, *, temperature: float
) -> None:
    """Add the gradients of the listed rows' scores.

    Args:
        scored: what `score_rows` returned.
        hidden_TH: [T, H].
        weight_VH: [V_local, H].
        upstream: of the T rows' main scores.
        destinations: where they go.
        temperature: divisor of the logits.
    """
    entries, dtype, width = scored.entries, scored.z_E.dtype, hidden_TH.shape[1]
    coefficients_E = entry_gradient(scored.z_E, entries.is_target_E, upstream.at(entries.call_rows_E)).div_(temperature)
    used, place_of_kept = torch.unique(entries.ids_E[entries.ids_E >= 0], return_inverse=True)
    for_hidden = torch.zeros(entries.rows_R.numel(), width, dtype=dtype, device=hidden_TH.device)
    for_weight = torch.zeros(used.numel(), width, dtype=dtype, device=hidden_TH.device)
    done = 0
    for places, call_rows, ids in _chunks(entries, width, dtype):
        coefficients = coefficients_E[places, None]
        if destinations.hidden is not None:
            for_hidden.index_add_(0, entries.segments_E[places], weight_VH[ids].to(dtype) * coefficients)
        if destinations.weight is not None:
            for_weight.index_add_(0, place_of_kept[done : done + ids.numel()], hidden_TH[call_rows].to(dtype) * coefficients)
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
