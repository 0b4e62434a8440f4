"""`nucleus_lm_head_log_probs`: scores over kept sets from hidden states and the output weight.

One autograd function. Forward scores the kept ids of each row, either by single dot products or out
of blocks of logits (`cost` chooses per row), reduces over the tensor-parallel group and keeps a few
numbers per row; backward gives the gradients of hidden states and weight.

Axes: T rows of a call, V_local ids of the shard, H inner dimension, E entries, K kinds of score.

Invariants: no [T, V] tensor exists; sums are float32 at least; no atomics, so results repeat; rows
that score 0 (not sampled, truncated) receive exactly zero gradient; with no kept set in the call,
nothing but the blocks runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rl_topp.errors import NucleusError
from rl_topp.lm_head import kernels
from rl_topp.lm_head.blocked import (
    BlockedRows,
    blocked_gradients,
    blocked_scores,
    make_blocked_rows,
)
from rl_topp.lm_head.cost import choose_blocked
from rl_topp.lm_head.operands import Operands
from rl_topp.lm_head.weight_gradient import Destinations, WeightGradient
from rl_topp.nucleus import NucleusSet, OnTruncated
from rl_topp.torch.call import Call, check_tensors, make_call
from rl_topp.torch.dense_rows import dense_upstream, store_dense
from rl_topp.torch.entries import segment_statistics
from rl_topp.torch.first_order import as_given, first_order
from rl_topp.torch.scores import (
    NO_SCORE,
    NucleusScores,
    combine,
    new_statistics,
    summed_entry_gradient,
    upstream_of_kinds,
)
from rl_topp.torch.upload import upload
from rl_topp.validation import is_integer

__all__ = ["HiddenGradient", "Method", "nucleus_lm_head_log_probs"]

HiddenGradient = Literal["all_reduce", "partial"]
"""What a tensor-parallel rank returns for the hidden states: the sum of all shards, or its part."""
Method = Literal["auto", "sparse", "blocked"]
"""How kept sets are scored: the cheaper way per row, always dot products, or always blocks."""

_BLOCK_BYTES = 256 * 2**20
"""Wide enough for products at full speed with 16,384 rows, small beside what a step holds."""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


class _Ways(NamedTuple):
    """The way each row with a kept set is scored, and the options of backward."""

    dot_products: npt.NDArray[np.int64]
    """Rows with kept sets scored by dot products."""
    blocked: npt.NDArray[np.int64]
    """Rows with kept sets scored out of blocks."""
    hidden_gradient: HiddenGradient
    """Who sums the hidden states' gradient over the tensor-parallel group."""
    use_main_grad: bool
    """Whether the weight's gradient goes to `main_grad` where that exists."""
    block_bytes: int
    """Bound on one block of logits, bytes."""


def nucleus_lm_head_log_probs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
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
    hidden_gradient: HiddenGradient = "all_reduce",
    use_main_grad: bool = True,
    method: Method = "auto",
    block_bytes: int = _BLOCK_BYTES,
) -> NucleusScores:
    """Score each row's target as `nucleus_log_probs(hidden @ weight.T, ...)`, without the product.

    Args:
        hidden_TH: [T, H], float64, float32 or bfloat16, contiguous rows: the same on every rank of
            `tp_group` (gathered, under sequence parallelism).
        weight_VH: [V_local, H], same dtype: this rank's shard of the output weight, tied to the
            embedding or not. Rows beyond the vocabulary are padding. With Megatron-Core's
            `main_grad` its gradient is added there, by Megatron's protocol (see `weight_gradient`).
        targets_T: integers [T], ids of the whole vocabulary; anything where the status is 2.
        rows: kept sets of the T rows: a `NucleusSet`, or what `align_rows` returns.
        vocab_start: id of this shard's first row, >= 0.
        tp_group: ranks that hold the other shards; all call with the same hidden states, rows and
            targets, and their shards hold every id exactly once, which is not checked. None = no
            other shards: this one must hold the whole vocabulary.
        temperature: divisor of the logits, the rollout's; > 0 and finite, a plain number.
        on_truncated: what a row with an incomplete set is worth, see `NucleusSet.scored_mask`.
        full_log_probs: also return the log-probs over the vocabulary (every sampled row then runs
            in blocks).
        entropy: also return the entropy over the kept set.
        full_entropy: also return the entropy over the vocabulary.
        hidden_gradient: `all_reduce` sums the hidden states' gradient over `tp_group`; `partial`
            leaves that to the caller, for whom an operation before this one does it (Megatron's
            copy to, or gather from, the tensor-parallel region).
        use_main_grad: False = return the weight's gradient even where `main_grad` exists.
        method: how kept sets are scored; `auto` chooses by expected cost. Where full scores are
            wanted, always blocks.
        block_bytes: bound on one block of logits, bytes.

    Returns:
        `NucleusScores` of T rows. A target outside the vocabulary scores -inf. First derivatives
        only; autocast changes nothing.

    Raises:
        NucleusError: shapes, dtypes, devices, targets or a shard that do not fit; a temperature
            that is not positive and finite; an unknown option; `create_graph=True` in backward.
    """
    check_tensors(hidden=hidden_TH, weight=weight_VH, targets=targets_T)
    _check_operands(hidden_TH, weight_VH)
    _check_options(hidden_gradient, method, block_bytes)
    call = make_call(
        rows,
        targets_T,
        num_rows=hidden_TH.shape[0],
        shard_size=weight_VH.shape[0],
        vocab_start=vocab_start,
        tp_group=tp_group,
        temperature=temperature,
        on_truncated=on_truncated,
        full_log_probs=full_log_probs,
        entropy=entropy,
        full_entropy=full_entropy,
    )
    in_blocks = _rows_in_blocks(call, weight_VH, method)
    ways = _Ways(
        dot_products=call.with_nucleus[~in_blocks],
        blocked=call.with_nucleus[in_blocks],
        hidden_gradient=hidden_gradient,
        use_main_grad=use_main_grad,
        block_bytes=block_bytes,
    )
    score: Callable[..., tuple[Tensor, ...]] = _LmHeadScores.apply
    return call.scores(*score(hidden_TH, weight_VH, targets_T, call, ways))


class _LmHeadScores(torch.autograd.Function):
    """(hidden, weight, targets, call, ways) -> log-probs [K, T], entropies [K, T] or None."""

    @staticmethod
    @as_given
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, call: Call, ways: _Ways
    ) -> tuple[Tensor, Tensor | None]:
        operands = Operands(
            hidden_TH=hidden_TH, weight_VH=weight_VH, targets_T=targets_T, call=call
        )
        statistics_K4T = new_statistics(
            call.num_kinds,
            len(call.rows),
            mass=NO_SCORE,
            dtype=operands.dtype,
            device=operands.device,
        )
        ctx.call, ctx.ways, ctx.weight = call, ways, weight_VH
        ctx.by_dot_products = ctx.by_blocks = None
        if ways.dot_products.size:
            ctx.by_dot_products = kernels.kernels_on(operands.device).score_rows(
                operands, ways.dot_products, statistics_K4T[0]
            )
        if ways.blocked.size or call.dense.size:
            ctx.by_blocks = _score_in_blocks(operands, ways, statistics_K4T)
        combined = combine(statistics_K4T, call.tp_group)
        ctx.save_for_backward(
            hidden_TH, weight_VH, targets_T, combined.log_normaliser, combined.entropy
        )
        wants_entropy = call.entropy or call.full_entropy
        return combined.log_probs, combined.entropy if wants_entropy else None

    @staticmethod
    @first_order
    @as_given
    def backward(
        ctx: Any, score_KT: Tensor, entropy_KT: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TH, weight_VH, targets_T, log_normaliser_KT, entropy_value_KT = ctx.saved_tensors
        call, ways = ctx.call, ctx.ways
        operands = Operands(
            hidden_TH=hidden_TH, weight_VH=weight_VH, targets_T=targets_T, call=call
        )
        arriving = upstream_of_kinds(score_KT, entropy_KT, log_normaliser_KT, entropy_value_KT)
        hidden = torch.zeros_like(hidden_TH) if ctx.needs_input_grad[0] else None
        weight = (
            WeightGradient(ctx.weight, use_main_grad=ways.use_main_grad)
            if ctx.needs_input_grad[1]
            else None
        )
        destinations = Destinations(hidden=hidden, weight=weight)
        # Blocks first: what they leave in a bfloat16 gradient is rounded before dot products add.
        if ctx.by_blocks is not None:
            blocked, z_E = ctx.by_blocks
            entries = blocked.entries
            coefficients_E = summed_entry_gradient(
                z_E, entries.is_target_E, entries.call_rows_E, arriving
            )
            full = dense_upstream(call, arriving)
            blocked_gradients(blocked, operands, full, coefficients_E, destinations)
        if ctx.by_dot_products is not None:
            entries, z_E = ctx.by_dot_products
            kernels.kernels_on(operands.device).add_gradients(
                entries, z_E, operands, arriving[0], destinations
            )
        if (
            hidden is not None
            and call.tp_group is not None
            and ways.hidden_gradient == "all_reduce"
        ):
            dist.all_reduce(hidden, group=call.tp_group)
        return hidden, None if weight is None else weight.finish(), None, None, None


def _score_in_blocks(
    operands: Operands, ways: _Ways, statistics_K4T: Tensor
) -> tuple[BlockedRows, Tensor]:
    """Write the statistics of rows that blocks score; return these, and z [E] of their entries."""
    dense = operands.call.dense
    every = np.union1d(dense, ways.blocked)
    rows_D, full_F = upload((every, np.searchsorted(every, dense)), operands.device)
    blocked = make_blocked_rows(
        rows_D.long(),
        full_F.long(),
        operands.entries_of(ways.blocked),
        operands,
        block_bytes=ways.block_bytes,
    )
    over_vocabulary_4F, z_E = blocked_scores(blocked, operands)
    statistics_K4T[0][:, blocked.entries.rows_R] = segment_statistics(blocked.entries, z_E)
    store_dense(statistics_K4T, operands.call, over_vocabulary_4F)
    return blocked, z_E


def _rows_in_blocks(call: Call, weight_VH: Tensor, method: Method) -> npt.NDArray[np.bool_]:
    """Return for each row with a kept set whether blocks score it."""
    listed_rows = call.with_nucleus
    if call.num_kinds > 1:
        # Blocks pass over its logits anyway, and sum each element of a gradient before rounding it.
        return np.ones(listed_rows.size, np.bool_)
    if method != "auto":
        return np.full(listed_rows.size, method == "blocked")
    return choose_blocked(
        call.rows.set_sizes[listed_rows],
        num_local_ids=call.num_local_ids,
        width=weight_VH.shape[1],
        device_type=weight_VH.device.type,
        blocks_run_anyway=call.dense.size > 0,
    )


def _check_operands(hidden_TH: Tensor, weight_VH: Tensor) -> None:
    current = torch.cuda.current_device() if hidden_TH.is_cuda else None
    NucleusError.raise_where(
        {
            "hidden states [T, H] and weight [V_local, H] do not fit:"
            f" {list(hidden_TH.shape)} and {list(weight_VH.shape)}": (
                hidden_TH.dim() != 2
                or weight_VH.dim() != 2
                or hidden_TH.shape[1] != weight_VH.shape[1]
            ),
            "hidden states and weight must share one of float64, float32, bfloat16; got"
            f" {hidden_TH.dtype} and {weight_VH.dtype} (autocast casts neither: cast the weight, or"
            " keep the hidden states)": (
                hidden_TH.dtype != weight_VH.dtype or hidden_TH.dtype not in _DTYPES
            ),
            f"tensors lie on {hidden_TH.device}, but the current device is {current}, where kernels"
            " would start": hidden_TH.is_cuda and hidden_TH.device.index != current,
        }
    )


def _check_options(hidden_gradient: str, method: str, block_bytes: int) -> None:
    NucleusError.raise_where(
        {
            "hidden_gradient must be 'all_reduce' or 'partial', got"
            f" {hidden_gradient!r}": hidden_gradient not in ("all_reduce", "partial"),
            f"method must be 'auto', 'sparse' or 'blocked', got {method!r}": (
                method not in ("auto", "sparse", "blocked")
            ),
            f"block_bytes must be a positive integer, got {block_bytes!r}": (
                not is_integer(block_bytes) or block_bytes < 1
            ),
        }
    )
