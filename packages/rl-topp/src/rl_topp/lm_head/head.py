"""`nucleus_lm_head_log_probs`: scores over kept sets from hidden states and the output weight,
without logits.

One autograd function. Forward scores the kept ids of each row, either by single
dot products or out of blocks of logits (`cost` chooses per row), reduces over the tensor-parallel
group and keeps a few numbers per row; backward gives the gradients of hidden states and weight.
Invariants: no [T, V] tensor exists; sums are float32 at least; no atomics, so results repeat; rows
that score 0 (not sampled, truncated) receive exactly zero gradient; with no kept set in the call,
nothing but the blocks runs.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rl_topp.errors import NucleusError
from rl_topp.lm_head import sparse
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
from rl_topp.torch.checks import check_rows, check_shard, check_targets, check_tensors
from rl_topp.torch.dense_rows import dense_upstream, store_dense
from rl_topp.torch.entries import build_entries, segment_statistics
from rl_topp.torch.first_order import as_given, first_order
from rl_topp.torch.row_kinds import RowKinds, sort_rows
from rl_topp.torch.scores import (
    NucleusScores,
    combine,
    summed_entry_gradient,
    unpack_scores,
    unscored_statistics,
    upstream_of_kinds,
)
from rl_topp.torch.upload import upload
from rl_topp.validation import is_integer

__all__ = ["HiddenGradient", "Method", "nucleus_lm_head_log_probs"]

HiddenGradient = Literal["all_reduce", "partial"]
"""What a tensor-parallel rank returns for the hidden states: the sum over all shards, or its own shard's part."""
Method = Literal["auto", "sparse", "blocked"]
"""How kept sets are scored: the cheaper way per row, always dot products, always blocks."""

_BLOCK_BYTES = 256 * 2**20
"""Wide enough for matrix products at full speed with 16,384 rows, small beside what a training step holds."""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


class _Call(NamedTuple):
    """What stays the same between forward and backward of one call."""

    rows: NucleusSet
    kinds: RowKinds
    sparse: npt.NDArray[np.int64]
    """Rows with kept sets scored by dot products."""
    blocked: npt.NDArray[np.int64]
    """Rows with kept sets scored out of blocks."""
    vocab_start: int
    held: int
    """Rows of the weight that are ids of the vocabulary; the rest is padding."""
    temperature: float
    want_full: bool
    want_entropy: bool
    tp_group: dist.ProcessGroup | None
    hidden_gradient: HiddenGradient
    use_main_grad: bool
    block_bytes: int

    def operands(self, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Operands:
        """Return what the ways of scoring work on."""
        return Operands(
            hidden_TH=hidden_TH,
            weight_VH=weight_VH,
            targets_T=targets_T,
            vocab_start=self.vocab_start,
            num_local_ids=self.held,
            temperature=self.temperature,
        )


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
    """Score each row's target over the row's kept set: `nucleus_log_probs(hidden @ weight.T, ...)`
    without the product.

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
        NucleusError: shapes, dtypes, devices, targets or a shard that do not fit, a temperature
            that is none, an unknown option; from backward: with `create_graph=True`.
    """
    check_tensors(hidden=hidden_TH, weight=weight_VH, targets=targets_T)
    _check_operands(hidden_TH, weight_VH)
    check_rows(
        rows, num_rows=hidden_TH.shape[0], temperature=temperature, on_truncated=on_truncated
    )
    check_targets(targets_T, num_rows=len(rows))
    check_shard(rows, vocab_start=vocab_start, num_local_ids=weight_VH.shape[0], tp_group=tp_group)
    _check_options(hidden_gradient, method, block_bytes)
    want_full = full_log_probs or full_entropy
    kinds = sort_rows(rows, on_truncated=on_truncated, want_full=want_full)
    held = int(np.clip(rows.vocab_size - vocab_start, 0, weight_VH.shape[0]))
    in_blocks = _rows_in_blocks(rows, kinds, held, weight_VH, method, want_full=want_full)
    call = _Call(
        rows=rows,
        kinds=kinds,
        sparse=kinds.kept[~in_blocks],
        blocked=kinds.kept[in_blocks],
        vocab_start=vocab_start,
        held=held,
        temperature=float(temperature),
        want_full=want_full,
        want_entropy=entropy or full_entropy,
        tp_group=tp_group,
        hidden_gradient=hidden_gradient,
        use_main_grad=use_main_grad,
        block_bytes=block_bytes,
    )
    log_probs_KT, entropy_KT = _LmHeadScores.apply(hidden_TH, weight_VH, targets_T, call)  # type: ignore[no-untyped-call]
    return unpack_scores(
        log_probs_KT,
        entropy_KT,
        full_log_probs=full_log_probs,
        entropy=entropy,
        full_entropy=full_entropy,
    )


class _LmHeadScores(torch.autograd.Function):
    """(hidden, weight, targets, call) -> log-probs [K, T] and entropies [K, T] (None unless wanted)."""

    @staticmethod
    @as_given
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor | None]:
        operands = call.operands(hidden_TH, weight_VH, targets_T)
        statistics = unscored_statistics(
            1 + call.want_full, len(call.rows), dtype=operands.dtype, device=operands.device
        )
        scored = blocked = z_blocked = None
        if call.sparse.size:
            scored = _dot_products(operands.device).score_rows(
                operands, call.rows, call.sparse, statistics[0]
            )
        if call.blocked.size or call.kinds.dense.size:
            blocked = _blocked_rows(call, operands)
            z_blocked = _score_in_blocks(blocked, operands, statistics, call)
        combined = combine(statistics, call.tp_group)
        ctx.call, ctx.scored, ctx.blocked, ctx.z_blocked, ctx.weight = (
            call,
            scored,
            blocked,
            z_blocked,
            weight_VH,
        )
        ctx.save_for_backward(
            hidden_TH, weight_VH, targets_T, combined.log_normaliser, combined.entropy
        )
        return combined.log_probs, combined.entropy if call.want_entropy else None

    @staticmethod
    @first_order
    @as_given
    def backward(
        ctx: Any, score_KT: Tensor, entropy_KT: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_TH, weight_VH, targets_T, log_normaliser_KT, entropy_value_KT = ctx.saved_tensors
        call, blocked = ctx.call, ctx.blocked
        operands = call.operands(hidden_TH, weight_VH, targets_T)
        kinds = upstream_of_kinds(score_KT, entropy_KT, log_normaliser_KT, entropy_value_KT)
        destinations = Destinations(
            hidden=torch.zeros_like(hidden_TH) if ctx.needs_input_grad[0] else None,
            weight=(
                WeightGradient(ctx.weight, use_main_grad=call.use_main_grad)
                if ctx.needs_input_grad[1]
                else None
            ),
        )
        if blocked is not None:
            entries = blocked.entries
            full = dense_upstream(
                call.kinds, score_KT, entropy_KT, log_normaliser_KT, entropy_value_KT
            )
            coefficients_E = summed_entry_gradient(
                ctx.z_blocked, entries.is_target_E, entries.call_rows_E, kinds
            )
            blocked_gradients(blocked, operands, full, coefficients_E, destinations)
        if ctx.scored is not None:
            _dot_products(operands.device).add_gradients(
                ctx.scored, operands, kinds[0], destinations
            )
        if (
            destinations.hidden is not None
            and call.tp_group is not None
            and call.hidden_gradient == "all_reduce"
        ):
            dist.all_reduce(destinations.hidden, group=call.tp_group)
        return (
            destinations.hidden,
            None if destinations.weight is None else destinations.weight.finish(),
            None,
            None,
        )


def _dot_products(device: torch.device) -> ModuleType:
    """Return the module that scores single entries on `device`; the one for CUDA is imported where CUDA is, since it needs Triton."""
    return (
        importlib.import_module("rl_topp.lm_head.sparse_cuda") if device.type == "cuda" else sparse
    )


def _score_in_blocks(
    blocked: BlockedRows, operands: Operands, statistics_K4T: Tensor, call: _Call
) -> Tensor:
    """Write the statistics of the rows that blocks score, and return z of their entries, [E]."""
    over_vocabulary, z_E = blocked_scores(blocked, operands)
    statistics_K4T[0][:, blocked.entries.rows_R] = segment_statistics(blocked.entries, z_E)
    store_dense(statistics_K4T, call.kinds, over_vocabulary)
    return z_E


def _blocked_rows(call: _Call, operands: Operands) -> BlockedRows:
    every = np.union1d(call.kinds.dense, call.blocked)
    rows_D, full_F = upload((every, np.searchsorted(every, call.kinds.dense)), operands.device)
    entries = build_entries(
        call.rows,
        call.blocked,
        operands.targets_T,
        vocab_start=call.vocab_start,
        num_local_ids=call.held,
    )
    return make_blocked_rows(
        rows_D.long(), full_F.long(), entries, operands, block_bytes=call.block_bytes
    )


def _rows_in_blocks(
    rows: NucleusSet,
    kinds: RowKinds,
    held: int,
    weight_VH: Tensor,
    method: Method,
    *,
    want_full: bool,
) -> npt.NDArray[np.bool_]:
    """Return for each row with a kept set whether blocks score it; where full scores are wanted, blocks pass over its logits anyway."""
    if want_full:  # and so each element of a gradient is summed before it is rounded
        return np.ones(kinds.kept.size, np.bool_)
    if method != "auto":
        return np.full(kinds.kept.size, method == "blocked")
    return choose_blocked(
        rows.set_sizes[kinds.kept],
        num_local_ids=held,
        width=weight_VH.shape[1],
        device_type=weight_VH.device.type,
        blocks_run_anyway=kinds.dense.size > 0,
    )


def _check_operands(hidden_TH: Tensor, weight_VH: Tensor) -> None:
    problems = []
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        problems.append(
            f"hidden states [T, H] and weight [V_local, H] do not fit: {list(hidden_TH.shape)} and"
            f" {list(weight_VH.shape)}"
        )
    if hidden_TH.dtype != weight_VH.dtype or hidden_TH.dtype not in _DTYPES:
        problems.append(
            "hidden states and weight must share one of float64, float32, bfloat16; got"
            f" {hidden_TH.dtype} and {weight_VH.dtype} (autocast casts neither: cast the weight, or"
            " keep the hidden states)"
        )
    if hidden_TH.is_cuda and hidden_TH.device.index != torch.cuda.current_device():
        problems.append(
            f"tensors lie on {hidden_TH.device}, but the current device is"
            f" {torch.cuda.current_device()}, where kernels would start"
        )
    NucleusError.raise_if(problems)


def _check_options(hidden_gradient: str, method: str, block_bytes: int) -> None:
    problems = []
    if hidden_gradient not in ("all_reduce", "partial"):
        problems.append(
            f"hidden_gradient must be 'all_reduce' or 'partial', got {hidden_gradient!r}"
        )
    if method not in ("auto", "sparse", "blocked"):
        problems.append(f"method must be 'auto', 'sparse' or 'blocked', got {method!r}")
    if not is_integer(block_bytes) or block_bytes < 1:
        problems.append(f"block_bytes must be a positive integer, got {block_bytes!r}")
    NucleusError.raise_if(problems)
