"""`nucleus_log_probs`: scores over kept sets from logits that exist already.

Only the logits of kept ids are read; a tensor-parallel shard adds its part and two small
all-reduces finish the sums. Every rank of the group computes the same loss from the same scores, so
each receives the gradient of its own shard of the logits and backward needs no collective.

Axes: T rows, D of them over the vocabulary, V_local ids of a shard, E entries, K kinds of score.

Invariants: no [T, V] mask, no masked or rescaled copy of the logits; the gradient of a row with a
kept set touches its kept entries only; rows over the whole vocabulary pass through float32 in
blocks of bounded size; an element of the gradient is summed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_topp.errors import NucleusError
from rl_topp.nucleus import NucleusSet, OnTruncated
from rl_topp.torch.call import Call, check_tensors, make_call
from rl_topp.torch.dense_rows import block_statistics, dense_upstream, store_dense
from rl_topp.torch.entries import Entries, build_entries, segment_statistics
from rl_topp.torch.first_order import as_given, first_order
from rl_topp.torch.scores import (
    NO_SCORE,
    NucleusScores,
    combine,
    compute_dtype,
    entry_gradient,
    new_statistics,
    summed_entry_gradient,
    upstream_of_kinds,
)

__all__ = ["nucleus_log_probs"]

_BLOCK_BYTES = 64 * 2**20
"""Bound on one block of float32 logits: keeps a GPU busy, and is small beside the logits."""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def nucleus_log_probs(
    logits_TV: Tensor,
    targets_T: Tensor,
    rows: NucleusSet,
    *,
    vocab_start: int = 0,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    on_truncated: OnTruncated = "mask",
    full_log_probs: bool = False,
    entropy: bool = False,
    full_entropy: bool = False,
) -> NucleusScores:
    """Score each row's target over the row's kept set.

    log p = z[y] - logsumexp(z[S]), z = logits / temperature, S = the kept set with the target
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    Args:
        logits_TV: [T, V_local], float64, float32, bfloat16 or float16: this rank's shard. Columns
            beyond the vocabulary are padding, never counted.
        targets_T: integers [T], ids of the whole vocabulary; anything where the status is 2.
        rows: kept sets of the T rows: a `NucleusSet`, or what `align_rows` returns.
        vocab_start: id of this shard's first column, >= 0.
        tp_group: ranks that hold the other shards; all call with the same rows and targets, and
            their shards hold every id exactly once, which is not checked. None = no other shards:
            this one must hold the whole vocabulary.
        temperature: divisor of the logits, the rollout's; > 0 and finite, a plain number.
        on_truncated: what a row with an incomplete set is worth, see `NucleusSet.scored_mask`.
        full_log_probs: also return the log-probs over the vocabulary.
        entropy: also return the entropy over the kept set.
        full_entropy: also return the entropy over the vocabulary.

    Returns:
        `NucleusScores` of T rows. A target outside the vocabulary scores -inf. First derivatives
        only; autocast changes nothing.

    Raises:
        NucleusError: tensors, targets, kept sets or a shard that do not fit, a temperature that is
            none, an unknown `on_truncated`; from backward: with `create_graph=True`.
    """
    check_tensors(logits=logits_TV, targets=targets_T)
    if logits_TV.dim() != 2 or logits_TV.dtype not in _DTYPES:
        raise NucleusError(
            "logits must have shape [T, V_local] and be float64, float32, bfloat16 or float16; got"
            f" {list(logits_TV.shape)}, {logits_TV.dtype}"
        )
    call = make_call(
        rows,
        targets_T,
        num_rows=logits_TV.shape[0],
        shard_size=logits_TV.shape[1],
        vocab_start=vocab_start,
        tp_group=tp_group,
        temperature=temperature,
        on_truncated=on_truncated,
        full_log_probs=full_log_probs,
        entropy=entropy,
        full_entropy=full_entropy,
    )
    score: Callable[..., tuple[Tensor, ...]] = _ScoresFromLogits.apply
    return call.scores(*score(logits_TV, targets_T, call))


class _ScoresFromLogits(torch.autograd.Function):
    """(logits, targets, call) -> log-probs [K, T] and entropies [K, T] (None unless wanted)."""

    @staticmethod
    @as_given
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        dtype = compute_dtype(logits_TV.dtype)
        entries = build_entries(
            call.rows,
            call.with_nucleus,
            targets_T,
            vocab_start=call.vocab_start,
            num_local_ids=call.num_local_ids,
        )
        z_E = _logits_of(entries, logits_TV, dtype).div_(call.temperature)
        statistics_K4T = new_statistics(
            call.num_kinds, len(call.rows), mass=NO_SCORE, dtype=dtype, device=logits_TV.device
        )
        statistics_K4T[0][:, entries.rows_R] = segment_statistics(entries, z_E)
        parts = [
            block_statistics(z_DV, targets_T[rows_D].long(), first_id=call.vocab_start)
            for rows_D, z_DV in _dense_blocks(logits_TV, call, dtype)
        ]
        if parts:
            store_dense(statistics_K4T, call, torch.cat(parts, dim=1))
        combined = combine(statistics_K4T, call.tp_group)
        ctx.call, ctx.entries = call, entries
        ctx.save_for_backward(logits_TV, targets_T, z_E, combined.log_normaliser, combined.entropy)
        wants_entropy = call.entropy or call.full_entropy
        return combined.log_probs, combined.entropy if wants_entropy else None

    @staticmethod
    @first_order
    @as_given
    def backward(
        ctx: Any, score_gradient_KT: Tensor, entropy_gradient_KT: Tensor | None
    ) -> tuple[Tensor, None, None]:
        logits_TV, targets_T, z_E, log_normaliser_KT, entropy_KT = ctx.saved_tensors
        call, entries = ctx.call, ctx.entries
        arriving = upstream_of_kinds(
            score_gradient_KT, entropy_gradient_KT, log_normaliser_KT, entropy_KT
        )
        dense = dense_upstream(call, arriving).as_columns()
        gradient_TV = torch.zeros_like(logits_TV)
        columns = torch.arange(call.num_local_ids, device=z_E.device) + call.vocab_start
        done = 0
        for rows_D, z_DV in _dense_blocks(logits_TV, call, z_E.dtype):
            here = torch.arange(done, done + rows_D.numel(), device=z_E.device)
            block_DV = entry_gradient(z_DV, columns == targets_T[rows_D, None], dense.at(here))
            gradient_TV[rows_D, : call.num_local_ids] = (block_DV / call.temperature).to(
                gradient_TV.dtype
            )
            done += rows_D.numel()
        # Written over what the blocks left there, and with it: so each element is rounded once.
        valid = entries.ids_E >= 0
        rows_N, ids_N = entries.call_rows_E[valid], entries.ids_E[valid]
        coefficients_N = summed_entry_gradient(
            z_E[valid], entries.is_target_E[valid], rows_N, arriving
        )
        gradient_TV[rows_N, ids_N] = (coefficients_N / call.temperature).to(gradient_TV.dtype)
        return gradient_TV, None, None


def _logits_of(entries: Entries, logits_TV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits [E] of the entries, -inf where the id counts nowhere."""
    if logits_TV.numel() == 0:
        return torch.full(entries.ids_E.shape, -torch.inf, dtype=dtype, device=logits_TV.device)
    values = logits_TV[entries.call_rows_E, entries.ids_E.clamp(min=0)].to(dtype)
    return values.masked_fill_(entries.ids_E < 0, -torch.inf)


def _dense_blocks(
    logits_TV: Tensor, call: Call, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows that need the whole vocabulary, int64 [D], with their z [D, num_local_ids]."""
    width = call.num_local_ids
    rows_per_block = max(1, _BLOCK_BYTES // max(1, width * dtype.itemsize))
    for first in range(0, call.dense.size, rows_per_block):
        listed = call.dense[first : first + rows_per_block]
        rows_D = torch.from_numpy(listed).to(logits_TV.device)
        yield rows_D, logits_TV[rows_D, :width].to(dtype).div_(call.temperature)
