"""Rows without a filter and large kept sets: scored one block of logits at a time.

Blocks run over the vocabulary, so each block of the weight's gradient is one complete matrix
product and needs no running sum; the logits of a block are computed again in backward.

Axes: D rows of a call, F of them over the vocabulary, B ids of a block, E entries, N of them in it.

Invariants: no tensor larger than a block of logits [D, B] with B <= ceil(V_local / 4) exists,
whatever the sizes; the entries of a kept set are read out of a block (and their gradients written
into one) without a mask.
"""

# Rounding of a gradient in bfloat16: each element of the result is rounded once, by at most u =
# 2**-8 (3.9e-3) of itself, and on a GPU with more than `_FEW_ROWS` rows each coefficient before it
# as well. Roundings of many numbers are independent: relative to the norm either costs about
# 1.7e-3, both 2.3e-3, under the 3e-3 that the head promises. Few rows do not average, and one that
# makes the whole gradient would cost up to 2 u; so coefficients of few rows keep 16 bits, and the
# result is that of float64 rounded once. A row of the weight whose id occurs among blocks and among
# dot products alike is rounded by both; scores over kept set and vocabulary of one row come out of
# the same block, where their sum is rounded once however much of it cancels.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rl_topp.lm_head import kernels
from rl_topp.lm_head.matmul import wide_matmul
from rl_topp.lm_head.operands import Operands
from rl_topp.lm_head.weight_gradient import Destinations
from rl_topp.torch.entries import Entries
from rl_topp.torch.scores import Upstream, compute_dtype, new_statistics

__all__ = ["BlockedRows", "blocked_gradients", "blocked_scores", "make_blocked_rows"]

_MIN_BLOCKS = 4
_FEW_ROWS = 256
"""Up to here a block's products wait for memory: coefficients in twice as many bits cost little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedRows:
    """Rows of a call, D of them, and what is wanted of each."""

    rows_D: Tensor
    """int64 [D]: rows of the call."""
    full_F: Tensor
    """int64 [F]: places in `rows_D` that need the whole vocabulary."""
    entries: Entries
    """Kept entries of the rows that have some; `entries.rows_R` are rows of the call."""
    by_id_N: Tensor
    """int64 [N]: numbers of the entries that count here, by ascending id."""
    places_N: Tensor
    """int64 [N]: place in `rows_D` of each of them."""
    edges: tuple[int, ...]
    """First id of each block, and the end of the last."""
    entry_edges: tuple[int, ...]
    """Where each block's entries begin in `by_id_N`, and the end of the last."""


def make_blocked_rows(
    rows_D: Tensor, full_F: Tensor, entries: Entries, operands: Operands, *, block_bytes: int
) -> BlockedRows:
    """Cut the vocabulary into blocks and sort the entries into them.

    Waits once for the device when there are entries.

    Args:
        rows_D: int64 [D], ascending.
        full_F: see `BlockedRows`.
        entries: entries of some of the rows.
        operands: of the call.
        block_bytes: bound on one block of logits.
    """
    num_local_ids = operands.call.num_local_ids
    row_bytes = max(1, rows_D.numel() * operands.dtype.itemsize)
    # At least `_MIN_BLOCKS` of them, so that small vocabularies are not one [D, V] tensor either.
    width = max(1, min(block_bytes // row_bytes, -(-num_local_ids // _MIN_BLOCKS)))
    edges = (*range(0, num_local_ids, width), num_local_ids)
    order_E, entry_edges = entries.ids_E, [0] * len(edges)
    if order_E.numel():
        sorted_ids, order_E = torch.sort(entries.ids_E, stable=True)
        entry_edges = torch.searchsorted(
            sorted_ids, torch.tensor(edges, device=sorted_ids.device)
        ).tolist()
    # Entries with id -1 sort before the first edge.
    by_id_N = order_E[entry_edges[0] : entry_edges[-1]]
    return BlockedRows(
        rows_D=rows_D,
        full_F=full_F,
        entries=entries,
        by_id_N=by_id_N,
        places_N=torch.searchsorted(rows_D, entries.call_rows_E[by_id_N]),
        edges=edges,
        entry_edges=tuple(edge - entry_edges[0] for edge in entry_edges),
    )


def blocked_scores(blocked: BlockedRows, operands: Operands) -> tuple[Tensor, Tensor]:
    """Return statistics [4, F] over the shard, and z [E] of the entries.

    Args:
        blocked: the rows.
        operands: of the call.
    """
    arithmetic = kernels.kernels_on(operands.device)
    targets_F = operands.targets_T[blocked.rows_D[blocked.full_F]].long()
    z_E = torch.full(
        blocked.entries.ids_E.shape, -torch.inf, dtype=operands.dtype, device=operands.device
    )
    statistics = new_statistics(
        1, targets_F.numel(), mass=0.0, dtype=operands.dtype, device=operands.device
    )[0]
    for block in _blocks(blocked, operands):
        z_E[block.numbers] = block.z_DB[block.places, block.columns]
        if targets_F.numel():
            first_id = operands.call.vocab_start + block.first
            arithmetic.merge_block_statistics(
                block.z_DB, blocked.full_F, targets_F, statistics, first_id=first_id
            )
    return statistics, z_E


def blocked_gradients(
    blocked: BlockedRows,
    operands: Operands,
    full: Upstream,
    coefficients_E: Tensor,
    destinations: Destinations,
) -> None:
    """Add the gradients of the rows' scores.

    Args:
        blocked: the rows.
        operands: of the call.
        full: what arrives at the scores over the vocabulary, [F].
        coefficients_E: dL/dz of the entries from all scores, [E].
        destinations: where they go.
    """
    arithmetic = kernels.kernels_on(operands.device)
    temperature, weight_VH = operands.call.temperature, operands.weight_VH
    hidden_DH = operands.hidden_TH[blocked.rows_D]
    targets_F = operands.targets_T[blocked.rows_D[blocked.full_F]].long()
    for_hidden = torch.zeros_like(hidden_DH, dtype=coefficients_E.dtype)
    for block in _blocks(blocked, operands):
        first_id = operands.call.vocab_start + block.first
        gradient_DB = arithmetic.block_gradient(
            block.z_DB,
            blocked.full_F,
            targets_F,
            full,
            first_id=first_id,
            temperature=temperature,
            dtype=_coefficient_dtype(hidden_DH),
        )
        # Not added: they hold what the full scores give there, and their sum is rounded once.
        gradient_DB[block.places, block.columns] = (coefficients_E[block.numbers] / temperature).to(
            gradient_DB.dtype
        )
        if destinations.hidden is not None:
            for_hidden += wide_matmul(
                gradient_DB, weight_VH[block.first : block.first + gradient_DB.shape[1]]
            )
        if destinations.weight is not None:
            destinations.weight.add_block(block.first, wide_matmul(gradient_DB.t(), hidden_DH))
    if destinations.hidden is not None:
        destinations.hidden[blocked.rows_D] += for_hidden.to(destinations.hidden.dtype)


class _Block(NamedTuple):
    """Logits of one block, and the entries that it holds."""

    first: int
    """First id, relative to the shard."""
    z_DB: Tensor
    """[D, B]: logit / temperature."""
    numbers: Tensor
    """int64 [N]: the entries' numbers."""
    places: Tensor
    """int64 [N]: their rows in the block."""
    columns: Tensor
    """int64 [N]: their columns."""


def _blocks(blocked: BlockedRows, operands: Operands) -> Iterator[_Block]:
    hidden_DH = operands.hidden_TH[blocked.rows_D]
    for index, (first, stop) in enumerate(zip(blocked.edges[:-1], blocked.edges[1:], strict=True)):
        z_DB = wide_matmul(hidden_DH, operands.weight_VH[first:stop].t())
        if operands.call.temperature != 1.0:
            z_DB.div_(operands.call.temperature)
        chosen = slice(blocked.entry_edges[index], blocked.entry_edges[index + 1])
        numbers = blocked.by_id_N[chosen]
        yield _Block(
            first, z_DB, numbers, blocked.places_N[chosen], blocked.entries.ids_E[numbers] - first
        )


def _coefficient_dtype(hidden_DH: Tensor) -> torch.dtype:
    return (
        hidden_DH.dtype
        if hidden_DH.is_cuda and hidden_DH.shape[0] > _FEW_ROWS
        else compute_dtype(hidden_DH.dtype)
    )
