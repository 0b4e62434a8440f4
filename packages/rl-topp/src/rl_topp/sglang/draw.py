"""Find the kept set of each row of a batch and draw from exactly that set, in plain torch.

The rule (SGLang's own joint filter), on probabilities p at the request's temperature, sorted so
that p_1 >= p_2 >= ...: keep id_r where r <= top_k, p_1 + ... + p_(r-1) <= top_p, p_r >= min_p * p_1
and p_r > 0. So the kept set is a prefix of the sorted row; among equal probabilities the order is
the sort's. This is the way of the CPU; `kernels` is the one of CUDA.

Axes: B rows of the batch, R rows of one kind, V vocabulary, K width of the prefix looked at.

Invariants: a sampled id is in its set; counts are exact for every row, whatever K is.
"""

# Worked: p = [0.5, 0.3, 0.2], top_p = 0.5 keeps two ids (the mass before the second is 0.5, not
# above it); the log-prob of the first over the set is log(0.5 / 0.8) = -0.47.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_topp.sglang.step import (
    COUNT,
    HEAD_SIZE,
    IDS,
    LOG_PROB,
    WHOLE_VOCABULARY,
    DrawnStep,
    empty_step,
)

__all__ = ["PREFIX_SIZE", "Filters", "NucleusPrefix", "draw_step", "find_nuclei"]

PREFIX_SIZE = 1024
"""Ids looked at before a whole row is.

With top_p 0.95 a language model keeps a handful, so they nearly always hold the set.
"""

Draw = Callable[[Tensor, Tensor], Tensor]
"""`draw(weights [R, N], rows [R])`: one index per row, int64 [R, 1].

Each is drawn with probability proportional to its weight; `rows` are their places in the batch.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters of B rows.

    Example: top_p 0.9 alone is `top_ks = [1 << 30], top_ps = [0.9], min_ps = None`.
    """

    top_ks: Tensor
    """int32 [B]; anything >= V keeps all."""
    top_ps: Tensor
    """float32 [B], in (0, 1]."""
    min_ps: Tensor | None
    """float32 [B], in [0, 1]; None where no row has one."""

    def of_rows(self, rows: Tensor) -> Filters:
        """Return the filters of some rows."""
        return Filters(
            top_ks=self.top_ks[rows],
            top_ps=self.top_ps[rows],
            min_ps=None if self.min_ps is None else self.min_ps[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NucleusPrefix:
    """The head of each row in descending order, cut to its kept set."""

    ids_RK: Tensor
    """int64 [R, K]: ids in descending order of probability."""
    probs_RK: Tensor
    """float32 [R, K]: their probabilities over the vocabulary; 0 outside the kept set."""
    counts_R: Tensor
    """int64 [R]: size of each kept set; the set is the first `count` ids."""


def find_nuclei(
    probs_RV: Tensor, filters: Filters, *, prefix_size: int = PREFIX_SIZE
) -> NucleusPrefix:
    """Return the kept sets of a batch.

    A prefix of `prefix_size` ids is looked at first; it holds a row's set iff its last id is not
    kept, or it is the whole of top-k or of the vocabulary. When it fails a row, the whole batch is
    sorted.

    Args:
        probs_RV: float32 [R, V], rows sum to 1; not changed.
        filters: R rows.
        prefix_size: ids looked at first.
    """
    if probs_RV.shape[-1] > prefix_size:
        nuclei = _cut(*torch.topk(probs_RV, prefix_size, dim=-1), filters)
        is_open_R = (nuclei.counts_R == prefix_size) & (filters.top_ks > prefix_size)
        if not bool(is_open_R.any()):
            return nuclei
    return _cut(*probs_RV.sort(dim=-1, descending=True), filters)


def draw_step(
    probs_BV: Tensor,
    filters: Filters,
    is_filtered: Sequence[bool],
    draw: Draw,
    *,
    prefix_size: int = PREFIX_SIZE,
) -> DrawnStep:
    """Sample each row from its kept set, or from the whole vocabulary where it has no filter.

    Args:
        probs_BV: float32 [B, V], rows sum to 1; not changed.
        filters: B rows.
        is_filtered: of each row, whether its filters can cut ids.
        draw: the source of randomness.
        prefix_size: as in `find_nuclei`.
    """
    ids_B, packed_BC, _ = empty_step(len(is_filtered), 0, probs_BV.device)
    log_probs_B = torch.empty(len(is_filtered), dtype=torch.float32)
    prefix_BK = torch.empty(len(is_filtered), 0, dtype=torch.int64)
    whole = [row for row, filtered in enumerate(is_filtered) if not filtered]
    if whole:
        rows = torch.tensor(whole)
        ids_R1 = draw(probs_BV[rows], rows)
        ids_B[rows] = ids_R1.view(-1).to(torch.int32)
        log_probs_B[rows] = torch.log(probs_BV[rows].gather(1, ids_R1).view(-1))
        packed_BC[rows, COUNT] = WHOLE_VOCABULARY
    cut = [row for row, filtered in enumerate(is_filtered) if filtered]
    if cut:
        rows = torch.tensor(cut)
        nuclei = find_nuclei(probs_BV[rows], filters.of_rows(rows), prefix_size=prefix_size)
        rank_R1 = draw(nuclei.probs_RK, rows)
        ids_B[rows] = nuclei.ids_RK.gather(1, rank_R1).view(-1).to(torch.int32)
        log_probs_B[rows] = torch.log(
            nuclei.probs_RK.gather(1, rank_R1).view(-1) / nuclei.probs_RK.sum(dim=-1)
        )
        packed_BC[rows, COUNT] = nuclei.counts_R.to(torch.int32)
        width = min(HEAD_SIZE, nuclei.ids_RK.shape[1])
        packed_BC[rows, IDS : IDS + width] = nuclei.ids_RK[:, :width].to(torch.int32)
        prefix_BK = torch.zeros(len(is_filtered), nuclei.ids_RK.shape[1], dtype=torch.int64)
        prefix_BK[rows] = nuclei.ids_RK
    packed_BC[:, LOG_PROB] = log_probs_B.view(torch.int32)
    return DrawnStep(ids_B=ids_B, packed_BC=packed_BC, prefix_BK=prefix_BK)


def _cut(sorted_RK: Tensor, ids_RK: Tensor, filters: Filters) -> NucleusPrefix:
    """Apply the rule of the module to rows in descending order."""
    rank_K = torch.arange(sorted_RK.shape[-1], device=sorted_RK.device)
    # The mass before each id, by subtraction as SGLang does it: another way would round otherwise.
    before_RK = torch.cumsum(sorted_RK, dim=-1) - sorted_RK
    keep_RK = (
        (rank_K < filters.top_ks.view(-1, 1))
        & (before_RK <= filters.top_ps.view(-1, 1))
        & (sorted_RK > 0)
    )
    if filters.min_ps is not None:
        keep_RK &= sorted_RK >= (sorted_RK[:, 0] * filters.min_ps).view(-1, 1)
    return NucleusPrefix(
        ids_RK=ids_RK, probs_RK=torch.where(keep_RK, sorted_RK, 0.0), counts_R=keep_RK.sum(dim=-1)
    )
