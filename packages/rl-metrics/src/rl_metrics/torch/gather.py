"""Rebuild full responses from the pieces the context-parallel ranks hold, in one collective.

Layer: above ``packing`` and ``groups``. Invariants, tested with real gloo: one all-reduce per call whatever the number of samples, one more in
backward; empty pieces take part; ``gather_responses(slice_response(x)) == x`` bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rl_metrics.arguments import listed
from rl_metrics.context_parallel import ContextParallel, IntArray, check_place, int_array
from rl_metrics.errors import MetricsError
from rl_metrics.packing import packed_responses
from rl_metrics.torch.groups import group_rank, group_size

__all__ = ["gather_responses"]


class _SumOverGroup(torch.autograd.Function):
    """All-reduce SUM whose backward is the same: the loss of a step is the sum of the ranks' losses."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def gather_responses(
    pieces: Sequence[torch.Tensor],
    total_lengths: Sequence[int] | IntArray,
    response_lengths: Sequence[int] | IntArray,
    cp: ContextParallel,
    *,
    group: dist.ProcessGroup | None,
    pad_multiple: int | None = None,
    stream_offsets: Sequence[int] | IntArray | None = None,
    stream_length: int | None = None,
) -> list[torch.Tensor]:
    """Return the full response-aligned tensor of every sample, on every rank, from this rank's pieces.

    Differentiable. The loss of a step is the sum of the losses of all ranks, so the gradient of a piece is the sum of what every rank
    sends back for it: one all-reduce in backward, which ALL ranks must reach. A rank that does not need the result adds ``0 * sum(result)``
    to its loss. A piece cut from a tensor in the graph stays in the graph even when it is empty; so pieces either require grad on
    all ranks or on none.

    Args:
        pieces: N tensors [n_i] or [n_i, ...] in the order of ``response_indices``; one dtype and device; ``n_i`` may be 0.
        total_lengths: int [N], the same on all ranks.
        response_lengths: int [N].
        cp: the rank's place.
        group: the context-parallel group; its size and this rank's place in it are those of ``cp``.
        pad_multiple: what sequences are padded to a multiple of; as in :func:`rl_metrics.padded_lengths`.
        stream_offsets: int [N], for ``contiguous``; as in :func:`rl_metrics.packed_responses`.
        stream_length: padded stream length, for ``contiguous``.

    Returns:
        N tensors [R_i, ...].

    Raises:
        MetricsError: when the pieces are no tensors of one dtype, device and width with the sizes the geometry gives, or ``cp`` is not the
            group's. Raised before the collective, from values all ranks share except the pieces themselves: a piece that is wrong on one
            rank alone leaves the others to the group's timeout.
        GeometryError: as in :func:`rl_metrics.packed_responses`.
    """
    check_place(cp)
    _check_group(cp, group)
    owned = packed_responses(
        total_lengths, response_lengths, cp, pad_multiple=pad_multiple, stream_offsets=stream_offsets, stream_length=stream_length
    )
    lengths = int_array(response_lengths).tolist()
    pieces = listed(pieces, "pieces, one per sample")
    if len(pieces) != len(lengths):
        raise MetricsError(
            f"{len(pieces)} pieces for {len(lengths)} samples; give one per sample, an empty one where this rank owns no token"
        )
    for i, (piece, count) in enumerate(zip(pieces, owned.counts.tolist(), strict=True)):
        if not isinstance(piece, torch.Tensor):
            raise MetricsError(f"sample {i}: the piece is {type(piece).__name__}; give a tensor")
        if piece.dim() < 1 or piece.shape[0] != count:
            raise MetricsError(
                f"sample {i}: the piece has shape {tuple(piece.shape)}, but rank {cp.rank} of {cp.size} owns {count} of its "
                f"{lengths[i]} response tokens"
            )
        if _kind(piece) != _kind(pieces[0]):
            raise MetricsError(f"sample {i}: the piece is {_kind(piece)}, that of sample 0 {_kind(pieces[0])}; give all alike")
    if not pieces:
        return []
    local = torch.cat(pieces)
    if cp.size == 1:
        return list(torch.split(local, lengths))
    full = local.new_zeros((sum(lengths), *local.shape[1:]))
    full = full.index_copy(0, torch.from_numpy(owned.flat_indices).to(local.device), local)
    total: torch.Tensor = _SumOverGroup.apply(full, group)  # type: ignore[no-untyped-call]
    return list(torch.split(total, lengths))


def _kind(piece: torch.Tensor) -> str:
    """Say what must be equal for pieces to be joined."""
    return f"{piece.dtype} on {piece.device} with {tuple(piece.shape[1:])} numbers a token"


def _check_group(cp: ContextParallel, group: dist.ProcessGroup | None) -> None:
    """Refuse a group whose size or rank is not that of ``cp``: the sum would mix up pieces."""
    size, rank = group_size(group), group_rank(group)
    if cp.size > 1 and (size, rank) != (cp.size, cp.rank):
        raise MetricsError(
            f"this is rank {rank} of a group of {size}, but cp says rank {cp.rank} of {cp.size}; pass the context-parallel group"
        )
