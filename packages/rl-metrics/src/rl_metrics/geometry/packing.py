"""The packed micro-batch: where each sample's tokens and response logits lie in the local stream.

A micro-batch is packed (Megatron calls the layout `thd`): its sequences lie one after the other in
one stream, each padded to a multiple of `pad_multiple`. This module turns the ranges of
`rl_metrics.geometry.context_parallel` into flat index arrays for such a stream; it adds no geometry
of its own.

Invariant, tested: `tokens[packed_token_index(...)]` is the local stream, and row `r` of a sample's
`packed_response_rows` holds the token right before the response token it predicts. Axes: N samples,
K ranges of one sequence on one rank, S rows of the local stream, T owned response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rl_metrics.arguments import IntArray, count
from rl_metrics.errors import GeometryError
from rl_metrics.geometry.context_parallel import (
    ContextParallel,
    check_place,
    int_array,
    owned_ranges,
)
from rl_metrics.geometry.responses import (
    PackedResponses,
    ResponseSlice,
    check_lengths,
    owned_responses,
    ramp,
)

__all__ = ["packed_response_rows", "packed_responses", "packed_token_index", "padded_lengths"]


def padded_lengths(
    total_lengths: Sequence[int] | IntArray, cp: ContextParallel, *, pad_multiple: int | None = None
) -> IntArray:
    """Return the length each sequence takes in the packed stream.

    Args:
        total_lengths: int [N], tokens.
        cp: the rank's place (only size and layout matter).
        pad_multiple: pad each sequence to a multiple of this. Default: `2 * cp.size` for zigzag
            (where any other value must be a multiple of that), 1 for contiguous.

    Returns:
        int64 [N]. Their running sum, from 0, is Megatron's `cu_seqlens_padded`.

    Raises:
        GeometryError: for a `pad_multiple` the layout cannot be cut with, and for lengths that are
            negative or no integers.

    Example:
        `padded_lengths([13, 3], ContextParallel(size=2))` is `[16, 4]`.
    """
    check_place(cp)
    base = 2 * cp.size if cp.layout == "zigzag" else 1
    multiple = (
        base
        if pad_multiple is None
        else count(pad_multiple, "pad_multiple", minimum=0, error=GeometryError)
    )
    if multiple < 1 or multiple % base:
        raise GeometryError(
            f"pad_multiple is {pad_multiple}; layout {cp.layout!r} over {cp.size} ranks needs a"
            f" positive multiple of {base}"
        )
    lengths = int_array(total_lengths)
    wrong = np.flatnonzero(lengths < 0)
    if wrong.size:
        raise GeometryError(
            f"sample {wrong[0]}: length {lengths[wrong[0]]}; a sequence has 0 tokens or more"
        )
    return -(-lengths // multiple) * multiple


def _packed_stream_length(
    padded: IntArray, cp: ContextParallel, stream_length: int | None = None
) -> int:
    """Return the length of the whole padded stream; the default is the shortest that can be cut."""
    used = int(padded.sum())
    if stream_length is None:
        return -(-used // cp.size) * cp.size
    stream_length = count(stream_length, "stream_length", minimum=0, error=GeometryError)
    if stream_length < used or stream_length % cp.size:
        raise GeometryError(
            f"stream_length is {stream_length}; the padded sequences take {used} tokens and"
            f" {cp.size} ranks share the stream, so it must be a multiple of {cp.size} that is at"
            f" least {used}"
        )
    return stream_length


def packed_token_index(
    total_lengths: Sequence[int] | IntArray,
    cp: ContextParallel,
    *,
    pad_multiple: int | None = None,
    stream_length: int | None = None,
) -> IntArray:
    """Return which token of the concatenated UNPADDED sequences lies at every local row.

    Args:
        total_lengths: int [N], tokens of each sequence, in stream order.
        cp: the rank's place.
        pad_multiple: as in `padded_lengths`.
        stream_length: length of the whole padded stream, tokens, a multiple of `cp.size`; default:
            no more padding than needed.

    Returns:
        int64 [stream_length / cp.size]: an index into `concat(sequences)`, or -1 where the row is
            padding.

    Raises:
        GeometryError: as in `padded_lengths`.

    Example:
        One sequence of 6 tokens over 2 ranks has chunks of 2: rank 0 holds `[0, 1, -1, -1]`, rank 1
        `[2, 3, 4, 5]`.
    """
    lengths = int_array(total_lengths)
    padded = padded_lengths(lengths, cp, pad_multiple=pad_multiple)
    length = _packed_stream_length(padded, cp, stream_length)
    firsts_N, places_N = np.cumsum(lengths) - lengths, np.cumsum(padded) - padded
    if cp.layout == "contiguous":
        # Lay the whole stream out, then cut this rank's part.
        stream = np.full(length, -1, np.int64)
        stream[np.repeat(places_N, lengths) + ramp(lengths)] = np.arange(int(lengths.sum()))
        return np.split(stream, cp.size)[cp.rank]
    starts_NK, stops_NK = owned_ranges(lengths, cp, offsets=places_N, padded=padded)
    sizes = (stops_NK - starts_NK).ravel()
    positions_S = np.repeat(starts_NK.ravel(), sizes) + ramp(sizes)
    samples_S = np.repeat(np.arange(lengths.size), padded // cp.size)
    index_S = np.where(positions_S < lengths[samples_S], firsts_N[samples_S] + positions_S, -1)
    # Padding of the stream itself lies behind the last sequence of every rank.
    tail = np.full(length // cp.size - index_S.size, -1, np.int64)
    return np.concatenate([index_S, tail])


def packed_responses(
    total_lengths: Sequence[int] | IntArray,
    response_lengths: Sequence[int] | IntArray,
    cp: ContextParallel,
    *,
    pad_multiple: int | None = None,
    stream_length: int | None = None,
    stream_offsets: Sequence[int] | IntArray | None = None,
) -> PackedResponses:
    """Return the response tokens this rank owns of a packed micro-batch, as flat arrays.

    Takes time linear in their number.

    Args:
        total_lengths: int [N], prompt and response tokens of each sequence, in stream order.
        response_lengths: int [N].
        cp: the rank's place.
        pad_multiple: as in `padded_lengths`.
        stream_length: as in `packed_token_index`.
        stream_offsets: int [N], where each sequence starts in the padded stream, for `contiguous`
            streams that are not simply the padded sequences back to back. Zigzag does not take it.

    Returns:
        Samples in order; inside a sample the response indices ascend.

    Raises:
        GeometryError: as in `padded_lengths` and `rl_metrics.response_slice`, and when given
            sequences overlap in the stream.
    """
    check_place(cp)
    totals, responses = int_array(total_lengths), int_array(response_lengths)
    check_lengths(totals, responses)
    padded = padded_lengths(totals, cp, pad_multiple=pad_multiple)
    starts = np.cumsum(padded) - padded
    if cp.layout == "zigzag":
        if stream_offsets is not None:
            raise GeometryError(
                "stream_offsets belong to layout 'contiguous'; zigzag sequences lie back to back,"
                " padded to pad_multiple"
            )
        _packed_stream_length(padded, cp, stream_length)
        owned = owned_responses(
            totals, responses, cp, offsets=starts, stream_length=None, padded=padded
        )
        # Each rank holds an equal share of every padded sequence before.
        rows = owned.logit_rows + (starts // cp.size)[owned.samples]
        return replace(owned, logit_rows=rows)
    offsets = starts if stream_offsets is None else int_array(stream_offsets)
    if offsets.shape != totals.shape:
        raise GeometryError(
            f"{offsets.size} stream offsets for {totals.size} samples; give one per sample"
        )
    if stream_offsets is None:
        stream_length = _packed_stream_length(padded, cp, stream_length)
    return owned_responses(totals, responses, cp, offsets=offsets, stream_length=stream_length)


def packed_response_rows(
    total_lengths: Sequence[int] | IntArray,
    response_lengths: Sequence[int] | IntArray,
    cp: ContextParallel,
    *,
    pad_multiple: int | None = None,
    stream_length: int | None = None,
) -> list[ResponseSlice]:
    """Return each sample's owned response tokens with rows of the PACKED LOCAL STREAM.

    The rows index a micro-batch's logits or hidden states. The stream is the one that
    `packed_token_index` (and `rl_metrics.torch.slice_tokens`) makes with the same arguments.

    Args:
        total_lengths: int [N], in stream order.
        response_lengths: int [N].
        cp: the rank's place.
        pad_multiple: as in `padded_lengths`.
        stream_length: as in `packed_token_index`.

    Returns:
        One `rl_metrics.ResponseSlice` per sample; empty ones where the rank owns no response token
        of the sample.

    Raises:
        GeometryError: as in `packed_responses`.

    Example:
        Two sequences of (L, R) = (13, 5) and (6, 3) over 2 ranks take 16 and 8 tokens of the
        stream, so rank 1 holds 8 and 4 local rows. Its rows are [3, 4, 5, 6, 7] for the first and,
        with chunks of 2 and the logits 2, 3, 4 on tokens [2, 4) and [4, 6), [8, 9, 10] for the
        second.
    """
    owned = packed_responses(
        total_lengths, response_lengths, cp, pad_multiple=pad_multiple, stream_length=stream_length
    )
    ends = np.cumsum(owned.counts)
    return [
        ResponseSlice(
            response_indices=owned.response_indices[start:end],
            logit_rows=owned.logit_rows[start:end],
        )
        for start, end in zip(ends - owned.counts, ends, strict=True)
    ]
