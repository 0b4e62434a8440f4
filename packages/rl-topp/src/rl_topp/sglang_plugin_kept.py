"""The kept set of each row of a batch, and sampling from exactly that set. Layer: engine; imports torch, not SGLang.

The rule, on probabilities p at the request's temperature, sorted so that p_1 >= p_2 >= ... (SGLang's own joint filter):

    keep id_r  iff  r <= top_k  and  p_1 + ... + p_(r-1) <= top_p  and  p_r >= min_p * p_1  and  p_r > 0

so the kept set is a prefix of the sorted row. Among equal probabilities the order is the sort's. Worked: p = [0.5, 0.3, 0.2], top_p = 0.5 keeps two ids
(the mass before the second is 0.5, not above it); log-prob of the first over the set is log(0.5 / 0.8) = -0.47.

Shape legend: B rows of the batch, V vocabulary, K width of the prefix that is looked at.

Invariants: a sampled id is in its set; `counts` is exact for every row, whatever K is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PREFIX_SIZE", "Filters", "KeptPrefix", "find_kept", "listed_ids", "sample", "sample_all"]

PREFIX_SIZE = 1024
"""Width of the prefix that is taken first. With top_p 0.95 a language model keeps a handful of ids, so it nearly always holds the set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters of each row. Example: top_p 0.9 alone is `top_ks = [1 << 30], top_ps = [0.9], min_ps = None`."""

    top_ks: Tensor
    """int32 [B]; anything >= V keeps all."""
    top_ps: Tensor
    """float32 [B], in (0, 1]."""
    min_ps: Tensor | None
    """float32 [B], in [0, 1]; None where no row has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrefix:
    """The head of each row in descending order, cut to its kept set."""

    ids_BK: Tensor
    """int64 [B, K]: ids in descending order of probability."""
    probs_BK: Tensor
    """float32 [B, K]: their probabilities over the vocabulary; 0 outside the kept set."""
    counts_B: Tensor
    """int64 [B]: size of each kept set; the set is the first `count` ids."""


def find_kept(probs_BV: Tensor, filters: Filters, *, prefix_size: int = PREFIX_SIZE) -> KeptPrefix:
    """Return the kept sets of a batch.

    A prefix of `prefix_size` ids is looked at first; it holds a row's set iff its last id is not kept, or it is the whole of top-k or of the vocabulary.
    When it fails a row, the whole batch is sorted.

    Args:
        probs_BV: float32 [B, V], rows sum to 1; not changed.
        filters: B rows.
        prefix_size: ids looked at first.
    """
    vocab_size = probs_BV.shape[-1]
    if vocab_size > prefix_size:
        sorted_BK, ids_BK = torch.topk(probs_BV, prefix_size, dim=-1)
        kept = _cut(sorted_BK, ids_BK, filters)
        open_end_B = (kept.counts_B == prefix_size) & (filters.top_ks > prefix_size)
        if not bool(open_end_B.any()):
            return kept
    sorted_BV, ids_BV = probs_BV.sort(dim=-1, descending=True)
    return _cut(sorted_BV, ids_BV, filters)


def sample(kept: KeptPrefix, draw: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Draw one id per row from its kept set.

    Args:
        kept: B kept sets.
        draw: takes weights float32 [B, K] that need not sum to 1 and returns an index per row, int64 [B, 1].

    Returns:
        int32 [B], the ids; float32 [B], their log-probs over the kept sets, in nats.
    """
    rank_B1 = draw(kept.probs_BK)
    probs_B = kept.probs_BK.gather(1, rank_B1).view(-1)
    return kept.ids_BK.gather(1, rank_B1).view(-1).to(torch.int32), torch.log(probs_B / kept.probs_BK.sum(dim=-1))


def sample_all(probs_BV: Tensor, draw: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Draw one id per row from the whole vocabulary; returns as `sample` does."""
    ids_B1 = draw(probs_BV)
    return ids_B1.view(-1).to(torch.int32), torch.log(probs_BV.gather(1, ids_B1).view(-1))


def listed_ids(kept: KeptPrefix, counts_B: Tensor) -> Tensor:
    """Return the first `counts_B` ids of each row, one row after the other, int64 [N]."""
    rank_K = torch.arange(kept.ids_BK.shape[-1], device=counts_B.device)
    return kept.ids_BK[rank_K < counts_B.view(-1, 1)]


def _cut(sorted_BK: Tensor, ids_BK: Tensor, filters: Filters) -> KeptPrefix:
    """Apply the rule of the module to rows in descending order."""
    rank_K = torch.arange(sorted_BK.shape[-1], device=sorted_BK.device)
    before_BK = torch.cumsum(sorted_BK, dim=-1) - sorted_BK
    keep_BK = (rank_K < filters.top_ks.view(-1, 1)) & (before_BK <= filters.top_ps.view(-1, 1)) & (sorted_BK > 0)
    if filters.min_ps is not None:
        keep_BK &= sorted_BK >= (sorted_BK[:, 0] * filters.min_ps).view(-1, 1)
    return KeptPrefix(ids_BK=ids_BK, probs_BK=torch.where(keep_BK, sorted_BK, 0.0), counts_B=keep_BK.sum(dim=-1))
