"""Tokens and response-aligned tensors, cut down to what one context-parallel rank holds.

Axes: S rows of the local stream, R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rl_metrics.arguments import listed, number
from rl_metrics.errors import MetricsError
from rl_metrics.geometry.context_parallel import ContextParallel
from rl_metrics.geometry.packing import packed_token_index
from rl_metrics.geometry.responses import response_slice

__all__ = ["slice_response", "slice_tokens"]


def slice_tokens(
    tokens: torch.Tensor | Sequence[torch.Tensor],
    cp: ContextParallel,
    *,
    pad_value: float = 0,
    pad_multiple: int | None = None,
    stream_length: int | None = None,
) -> torch.Tensor:
    """Return this rank's part of the packed stream of one or more sequences.

    Works for anything that is aligned with tokens: ids, positions, labels. The rows
    `rl_metrics.packed_response_rows` gives for the same arguments index the result.

    Args:
        tokens: sequences [L_i] or [L_i, ...] of one dtype and device, in stream order; a single
            tensor is a stream of one sequence.
        cp: the rank's place.
        pad_value: what stands at padding.
        pad_multiple: pad every sequence to a multiple of this many tokens; default `2 * cp.size`
            for zigzag, 1 for contiguous.
        stream_length: length of the whole padded stream, a multiple of `cp.size`; default: no more
            padding than needed.

    Returns:
        Tensor [stream_length / cp.size, ...].

    Raises:
        GeometryError: when the padding does not fit the layout.
        MetricsError: when there is no sequence, so that dtype and device are unknown, the sequences
            are no tensors of one dtype, device and width, or their dtype cannot hold `pad_value`.

    Example:
        `slice_tokens([arange(6)], ContextParallel(size=2, rank=0))` is `[0, 1, 0, 0]`: tokens 0, 1
        and two of padding.
    """
    sequences: list[Any] = (
        [tokens]
        if isinstance(tokens, torch.Tensor)
        else listed(tokens, "tokens, one tensor per sequence")
    )
    if not sequences:
        raise MetricsError(
            "no sequences to slice; a micro-batch without samples has no packed stream"
        )
    for i, sequence in enumerate(sequences):
        if not isinstance(sequence, torch.Tensor) or sequence.dim() < 1:
            raise MetricsError(
                f"sequence {i}: got {_described(sequence)}; give a tensor [L] or [L, ...]"
            )
        first = sequences[0]
        mine, others = ((x.dtype, x.device, x.shape[1:]) for x in (sequence, first))
        if mine != others:
            raise MetricsError(
                f"sequence {i} is {_described(sequence)}, sequence 0 {_described(first)};"
                " give one dtype, device and width"
            )
    index = packed_token_index(
        [sequence.shape[0] for sequence in sequences],
        cp,
        pad_multiple=pad_multiple,
        stream_length=stream_length,
    )
    flat = sequences[0] if len(sequences) == 1 else torch.cat(sequences)
    index_S = torch.from_numpy(index).to(flat.device)
    padding = flat.new_full((1, *flat.shape[1:]), _checked_padding(pad_value, flat.dtype))
    # Rows of padding take the one entry behind the last token.
    rows_S = torch.where(index_S < 0, flat.shape[0], index_S)
    return torch.cat([flat, padding]).index_select(0, rows_S)


def slice_response(
    response: torch.Tensor,
    total_length: int,
    response_length: int,
    cp: ContextParallel,
    *,
    stream_offset: int = 0,
    stream_length: int | None = None,
    padded_length: int | None = None,
) -> torch.Tensor:
    """Return this rank's part of a response-aligned tensor, in the order of `response_indices`.

    Args:
        response: tensor [R] or [R, ...], one entry per response token.
        total_length: `L`, tokens.
        response_length: `R`, tokens.
        cp: the rank's place.
        stream_offset: as in `rl_metrics.chunk_ranges`.
        stream_length: as in `rl_metrics.chunk_ranges`.
        padded_length: as in `rl_metrics.chunk_ranges`.

    Returns:
        Tensor [n] or [n, ...]; n may be 0. Differentiable.

    Raises:
        MetricsError: when it is no tensor, or does not hold `R` entries.
        GeometryError: as in `rl_metrics.response_slice`.
    """
    if not isinstance(response, torch.Tensor):
        raise MetricsError(
            f"the response is {_described(response)}; give a tensor with an entry per response"
            " token"
        )
    owned = response_slice(
        total_length,
        response_length,
        cp,
        stream_offset=stream_offset,
        stream_length=stream_length,
        padded_length=padded_length,
    )
    if response.dim() < 1 or response.shape[0] != response_length:
        raise MetricsError(
            f"the response tensor has shape {tuple(response.shape)}, but the response has"
            f" {response_length} tokens"
        )
    return response.index_select(0, torch.from_numpy(owned.response_indices).to(response.device))


def _checked_padding(pad_value: float, dtype: torch.dtype) -> float:
    """Return what stands at padding; a fraction is not cut to fit into integers."""
    value = number(pad_value, "pad_value")
    if dtype.is_floating_point or dtype.is_complex:
        most = torch.finfo(dtype).max
        if math.isfinite(value) and abs(value) > most:
            raise MetricsError(
                f"pad_value is {pad_value}, which {dtype} cannot hold; give a number in"
                f" {-most:g}..{most:g}"
            )
        return value
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    # int() of the argument itself: float64 would round an integer beyond 2^53.
    if not (value.is_integer() and low <= int(pad_value) <= high):
        raise MetricsError(
            f"pad_value is {pad_value}, which {dtype} cannot hold; give an integer in {low}..{high}"
        )
    return int(pad_value)


def _described(value: object) -> str:
    """Return a tensor's shape, dtype and device, or the type of anything else."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
    return type(value).__name__
