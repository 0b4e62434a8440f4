"""Rebuild full responses from the pieces the context-parallel ranks hold, in one collective.

Invariants, tested with real gloo: one all-reduce per call whatever the number of samples, one more
in backward; empty pieces take part; `gather_responses(slice_response(x)) == x` bit for bit, -0.0
and NaN included; ranks whose pieces do not fit together all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_metrics.arguments import IntArray, listed
from rl_metrics.errors import MetricsError
from rl_metrics.geometry.context_parallel import ContextParallel, check_place, int_array
from rl_metrics.geometry.packing import packed_responses
from rl_metrics.torch.bits import (
    PieceHeader,
    agreed_dtype,
    check_dtype,
    from_bits,
    layout_digest,
    to_bits,
)
from rl_metrics.torch.groups import group_rank, group_size

__all__ = ["gather_responses"]


class _Gather(torch.autograd.Function):
    """One all-reduce of bits forward, one of gradients backward.

    Gradients add up, since the loss of a step is the sum of the ranks' losses. Axes: T local
    response tokens, A those of all ranks, W numbers per token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        places: torch.Tensor,
        num_tokens: int,
        header: PieceHeader,
        cp: ContextParallel,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.places, ctx.group, ctx.dtype = places, group, local.dtype
        width = local.shape[1:].numel()
        # One buffer: a header of every rank, then the bits of every token. Each place is filled by
        # one rank and 0 on the others, so the sum of integers is the integer that was sent.
        headers = torch.zeros(cp.size, PieceHeader.SIZE, dtype=torch.int64, device=local.device)
        headers[cp.rank] = torch.tensor(header.packed(), device=local.device)
        bits_AW = headers.new_zeros(num_tokens, width)
        bits_AW[places] = to_bits(local).reshape(local.shape[0], width)
        wire = torch.cat([headers.reshape(-1), bits_AW.reshape(-1)])
        dist.all_reduce(wire, group=group)
        told, bits = torch.split(wire, [headers.numel(), bits_AW.numel()])
        dtype = agreed_dtype(PieceHeader.unpacked(told.tolist()), default=local.dtype)
        return from_bits(bits, dtype).reshape(num_tokens, *local.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.index_select(0, ctx.places).to(ctx.dtype), None, None, None, None, None


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
    """Return the full response-aligned tensor of every sample, on every rank, from its pieces.

    Differentiable once: a second derivative raises. The loss of a step is the sum of the losses of
    all ranks, so the gradient of a piece is the sum of what every rank sends back for it: one
    all-reduce in backward, which ALL ranks must reach. A rank that does not need the result adds `0
    * sum(result)` to its loss. A piece cut from a tensor in the graph stays in the graph even when
    it is empty; so pieces either require grad on all ranks or on none, which is checked.

    What travels is the bits of every number in 8 bytes, whatever the dtype, beside a header of each
    rank; so ranks that disagree find out instead of reading one another's bytes.

    Args:
        pieces: N tensors [n_i] or [n_i, ...] in the order of `response_indices`; one dtype of at
            most 8 bytes, one device; `n_i` may be 0. A rank that owns no token at all gets the
            dtype of the others, but must give their width: `torch.zeros(0, 3)` beside `[n, 3]`.
        total_lengths: int [N], the same in the same order on all ranks, like all that follows but
            `cp.rank`.
        response_lengths: int [N].
        cp: the rank's place.
        group: the context-parallel group; its size and this rank's place in it are those of `cp`.
        pad_multiple: what sequences are padded to a multiple of; as in `rl_metrics.padded_lengths`.
        stream_offsets: int [N], for `contiguous`; as in `rl_metrics.packed_responses`.
        stream_length: padded stream length, for `contiguous`.

    Returns:
        N tensors [R_i, ...].

    Raises:
        MetricsError: on every rank the same, when dtypes, lengths, layouts or the need for
            gradients differ over ranks. On this rank alone, before the collective, when the pieces
            are no tensors of one dtype, device and width with the sizes the geometry gives, or `cp`
            is not the group's: the others are then left to the group's timeout, as they are where
            the width or the sum of response lengths differs.
        GeometryError: as in `rl_metrics.packed_responses`.
    """
    check_place(cp)
    _check_group(cp, group)
    owned = packed_responses(
        total_lengths,
        response_lengths,
        cp,
        pad_multiple=pad_multiple,
        stream_offsets=stream_offsets,
        stream_length=stream_length,
    )
    lengths = int_array(response_lengths).tolist()
    pieces = _checked_pieces(pieces, owned.counts.tolist(), lengths, cp)
    if not pieces:
        return []
    local = torch.cat(pieces)
    if cp.size == 1:
        return list(torch.split(local, lengths))
    check_dtype(local.dtype)
    header = PieceHeader(
        dtype=local.dtype if local.shape[0] else None,
        layout=layout_digest(
            total_lengths,
            response_lengths,
            cp,
            pad_multiple=pad_multiple,
            offsets=stream_offsets,
            stream_length=stream_length,
        ),
        requires_grad=torch.is_grad_enabled() and local.requires_grad,
    )
    places = torch.from_numpy(owned.flat_indices).to(local.device)
    gather: Callable[..., torch.Tensor] = _Gather.apply
    full = gather(local, places, sum(lengths), header, cp, group)
    return list(torch.split(full, lengths))


def _checked_pieces(
    pieces: Any, counts: list[int], lengths: list[int], cp: ContextParallel
) -> list[torch.Tensor]:
    """Return the pieces as a list, after checking that they are alike and what this rank owns."""
    given: list[torch.Tensor] = listed(pieces, "pieces, one per sample")
    if len(given) != len(lengths):
        raise MetricsError(
            f"{len(given)} pieces for {len(lengths)} samples; give one per sample, an empty one"
            " where this rank owns no token"
        )
    for i, (piece, count) in enumerate(zip(given, counts, strict=True)):
        if not isinstance(piece, torch.Tensor):
            raise MetricsError(f"sample {i}: the piece is {type(piece).__name__}; give a tensor")
        if piece.dim() < 1 or piece.shape[0] != count:
            raise MetricsError(
                f"sample {i}: the piece has shape {tuple(piece.shape)}, but rank {cp.rank} of"
                f" {cp.size} owns {count} of its {lengths[i]} response tokens"
            )
        if _kind(piece) != _kind(given[0]):
            raise MetricsError(
                f"sample {i}: the piece is {_kind(piece)}, that of sample 0 {_kind(given[0])}; give"
                " all alike"
            )
    return given


def _kind(piece: torch.Tensor) -> str:
    """Say what must be equal for pieces to be joined."""
    return f"{piece.dtype} on {piece.device} with {tuple(piece.shape[1:])} numbers a token"


def _check_group(cp: ContextParallel, group: dist.ProcessGroup | None) -> None:
    """Refuse a group whose size or rank is not that of `cp`: the sum would mix up pieces."""
    size, rank = group_size(group), group_rank(group)
    if cp.size > 1 and (size, rank) != (cp.size, cp.rank):
        raise MetricsError(
            f"this is rank {rank} of a group of {size}, but cp says rank {cp.rank} of {cp.size};"
            " pass the context-parallel group"
        )
