"""Rows scored against the whole vocabulary shard, one block of logits at a time: the way for rows without a filter and for large kept sets.

Layer: torch. Blocks run over the vocabulary, so each block of the weight's gradient is one complete matrix product and needs no running sum; the logits
of a block are computed again in backward. Invariants: no tensor larger than a block of logits [D, B] with B <= ceil(V_local / 4) exists, whatever the sizes;
the entries of a kept set are read out of a block (and their gradients written into one) without a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_topp.lm_head.matmul import wide_matmul
from rl_topp.lm_head.weight_gradient import Destinations
from rl_topp.torch.dense_rows import block_statistics, merge_statistics
from rl_topp.torch.entries import Entries
from rl_topp.torch.scores import compute_dtype, entry_gradient

__all__ = ["BlockedRows", "FullGradient", "blocked_gradients", "blocked_scores", "make_blocked_rows"]

_MIN_BLOCKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedRows:
    """D rows of a call, and what is wanted of each."""

    rows_D: Tensor
    """int64 [D]: rows of the call."""
    full_F: Tensor | None
    """int64 [F]: places in `rows_D` that need the whole vocabulary; None = all of them."""
    entries: Entries
    """Kept entries of the rows that have some; `entries.rows_R` are rows of the call."""
    by_id_E: Tensor
    """int64 [N]: numbers of the entries that count here, by ascending id."""
    places_E: Tensor
    """int64 [N]: place in `rows_D` of each of them."""
    edges: tuple[int, ...]
    """First id of each block, and the end of the last."""
    entry_edges: tuple[int, ...]
    """Where each block's entries begin in `by_id_E`, and the end of the last."""

    @property
    def num_full(self) -> int:
        """Number of rows that need the whole vocabulary."""
        return self.rows_D.numel() if self.full_F is None else self.full_F.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class FullGradient:
    """What backward knows about the F rows that need the whole vocabulary; all [F]."""

    score: Tensor
    """dL/d(log p)."""
    entropy: Tensor | None
    """dL/dH, or None."""
    log_normaliser: Tensor
    entropy_value: Tensor
    """H."""


def make_blocked_rows(
    rows_D: Tensor, full_F: Tensor | None, entries: Entries, *, num_local_ids: int, itemsize: int, block_bytes: int
) -> BlockedRows:
    """Cut the vocabulary into blocks and sort the entries into them (waits once for the device when there are entries).

    Args:
        rows_D: int64 [D], ascending.
        full_F: see `BlockedRows`.
        entries: entries of some of the rows.
        num_local_ids: ids of this shard.
        itemsize: bytes of one logit in the computing dtype.
        block_bytes: bound on one block of logits.
    """
    width = max(1, min(block_bytes // max(1, rows_D.numel() * itemsize), -(-num_local_ids // _MIN_BLOCKS)))
    edges = (*range(0, num_local_ids, width), num_local_ids)
    if entries.ids_E.numel() == 0:
        nothing = entries.ids_E
        return BlockedRows(
            rows_D=rows_D, full_F=full_F, entries=entries, by_id_E=nothing, places_E=nothing, edges=edges, entry_edges=(0,) * len(edges)
        )
    sorted_ids, order = torch.sort(entries.ids_E, stable=True)
    entry_edges = tuple(torch.searchsorted(sorted_ids, torch.tensor(edges, device=sorted_ids.device)).tolist())
    by_id = order[entry_edges[0] : entry_edges[-1]]  # entries with id -1 sort before the first edge
    return BlockedRows(
        rows_D=rows_D,
        full_F=full_F,
        entries=entries,
        by_id_E=by_id,
        places_E=torch.searchsorted(rows_D, entries.call_rows_E[by_id]),
        edges=edges,
        entry_edges=tuple(edge - entry_edges[0] for edge in entry_edges),
    )


def blocked_scores(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, blocked: BlockedRows, *, vocab_start: int, temperature: float, want_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return statistics [4, F] over the shard, and z [E] of the entries.

    Args:
        hidden_TH: [T, H].
        weight_VH: [V_local, H]; the rows beyond the last edge are padding.
        targets_T: integers [T].
        blocked: the rows.
        vocab_start: first id of the shard.
        temperature: divisor of the logits.
        want_entropy: whether the spread is needed.
    """
    dtype = compute_dtype(hidden_TH.dtype)
    z_E = torch.full(blocked.entries.ids_E.shape, -torch.inf, dtype=dtype, device=hidden_TH.device)
    full_rows = blocked.rows_D if blocked.full_F is None else blocked.rows_D[blocked.full_F]
    targets_F = targets_T[full_rows].long()
    statistics = torch.zeros(4, blocked.num_full, dtype=dtype, device=hidden_TH.device)
    statistics[:2] = -torch.inf
    for first, z_DB, numbers, places, columns in _blocks(hidden_TH[blocked.rows_D], weight_VH, blocked, temperature):
        z_E[numbers] = z_DB[places, columns]
        if blocked.num_full:
            z_FB = z_DB if blocked.full_F is None else z_DB[blocked.full_F]
            part = block_statistics(z_FB, targets_F, first_id=vocab_start + first, want_entropy=want_entropy)
            statistics = merge_statistics(statistics, part)
    return statistics, z_E


def blocked_gradients(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    blocked: BlockedRows,
    full: FullGradient,
    coefficients_E: Tensor,
    *,
    vocab_start: int,
    temperature: float,
    destinations: Destinations,
) -> None:
    """Add the gradients of the rows' scores.

    Args:
        hidden_TH: [T, H].
        weight_VH: [V_local, H].
        targets_T: integers [T].
        blocked: the rows.
        full: upstream of the scores over the vocabulary.
        coefficients_E: dL/dz of the entries, [E].
        vocab_start: first id of the shard.
        temperature: divisor of the logits.
        destinations: where they go.
    """
    hidden_DH = hidden_TH[blocked.rows_D]
    full_rows = blocked.rows_D if blocked.full_F is None else blocked.rows_D[blocked.full_F]
    places_F = targets_T[full_rows].long() - vocab_start
    for_hidden = torch.zeros_like(hidden_DH, dtype=coefficients_E.dtype)
    for first, z_DB, numbers, places, columns in _blocks(hidden_DH, weight_VH, blocked, temperature):
        gradient_DB = _block_gradient(z_DB, places_F - first, blocked, full)
        gradient_DB[places, columns] += coefficients_E[numbers]
        gradient_DB = gradient_DB.div_(temperature).to(hidden_DH.dtype)
        block_BH = weight_VH[first : first + z_DB.shape[1]]
        if destinations.hidden is not None:
            for_hidden += wide_matmul(gradient_DB, block_BH)
        if destinations.weight is not None:
            destinations.weight.add_block(first, wide_matmul(gradient_DB.t(), hidden_DH))
    if destinations.hidden is not None:
        destinations.hidden[blocked.rows_D] += for_hidden.to(destinations.hidden.dtype)


def _blocks(hidden_DH: Tensor, weight_VH: Tensor, blocked: BlockedRows, temperature: float) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
    """Yield per block: its first local id, z [D, B], and its entries' numbers, rows and columns."""
    for index, (first, stop) in enumerate(zip(blocked.edges[:-1], blocked.edges[1:], strict=True)):
        z_DB = wide_matmul(hidden_DH, weight_VH[first:stop].t()).div_(temperature)
        chosen = slice(blocked.entry_edges[index], blocked.entry_edges[index + 1])
        numbers = blocked.by_id_E[chosen]
        yield first, z_DB, numbers, blocked.places_E[chosen], blocked.entries.ids_E[numbers] - first


def _block_gradient(z_DB: Tensor, columns_F: Tensor, blocked: BlockedRows, full: FullGradient) -> Tensor:
    """Return dL/dz [D, B] of the scores over the vocabulary; zero for rows that have none."""
    if not blocked.num_full:
        return torch.zeros_like(z_DB)
    z_FB = z_DB if blocked.full_F is None else z_DB[blocked.full_F]
    gradient_FB = entry_gradient(
        z_FB - full.log_normaliser[:, None],
        torch.arange(z_FB.shape[1], device=z_FB.device) == columns_F[:, None],
        full.score[:, None],
        None if full.entropy is None else full.entropy[:, None],
        full.entropy_value[:, None],
    )
    if blocked.full_F is None:
        return gradient_FB
    gradient_DB = torch.zeros_like(z_DB)
    gradient_DB[blocked.full_F] = gradient_FB
    return gradient_DB
