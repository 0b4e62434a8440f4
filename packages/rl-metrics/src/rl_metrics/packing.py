"""The packed micro-batch: where each sample's tokens and response logits lie in this rank's local
stream.

A micro-batch is packed (Megatron calls the layout `thd`): its sequences lie one after the other in
one stream, each padded to a multiple of `pad_multiple`. This module turns
`rl_metrics.context_parallel` into flat index arrays for such a stream; it adds no geometry of its
own.

Invariant, tested: `tokens[packed_token_index(...)]` is the local stream, and row `r` of a sample's
`packed_response_rows` holds the token right before the response token it predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_metrics.arguments import count
from rl_metrics.context_parallel import (
    ContextParallel,
    IntArray,
    ResponseSlice,
    check_lengths,
    check_not_negative,
    check_place,
    int_array,
    owned_logits,
    ramp,
    zigzag_starts,
)
from rl_metrics.errors import GeometryError

__all__ = [
    "PackedResponses",
    "packed_response_rows",
    "packed_responses",
    "packed_stream_length",
    "packed_token_index",
    "padded_lengths",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedResponses:
    """The response tokens one rank owns of a packed micro-batch, flat, sample after sample."""

    counts: IntArray
    """int64 [N]: owned response tokens per sample; may be 0."""

    samples: IntArray
    """int64 [n]: index of each owned token's sample in the micro-batch."""

    response_indices: IntArray
    """int64 [n]: index into that sample's response."""

    flat_indices: IntArray
    """int64 [n]: index into the concatenation of all FULL responses of the micro-batch."""

    logit_rows: IntArray
    """int64 [n]: row of the packed local stream whose logit predicts the token."""


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
    check_not_negative(lengths)
    return -(-lengths // multiple) * multiple


def packed_stream_length(
    padded: IntArray, cp: ContextParallel, stream_length: int | None = None
) -> int:
    """Return the length of the whole padded stream, tokens.

    Args:
        padded: int64 [N], as `padded_lengths` gives them.
        cp: the rank's place.
        stream_length: the wanted length; default: the smallest multiple of `cp.size` that holds the
            sequences.

    Raises:
        GeometryError: when `stream_length` is shorter than the sequences or no multiple of
            `cp.size`.
    """
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
    """Return, for every row of this rank's local stream, which token of the concatenated UNPADDED
    sequences lies there.

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
    length = packed_stream_length(padded, cp, stream_length)
    first = np.cumsum(lengths) - lengths
    if cp.layout == "contiguous":
        part = length // cp.size
        stream = np.full(length, -1, np.int64)
        stream[np.repeat(np.cumsum(padded) - padded, lengths) + ramp(lengths)] = np.arange(
            int(lengths.sum())
        )
        return stream[cp.rank * part : (cp.rank + 1) * part]
    starts, chunk = zigzag_starts(lengths, padded, cp)
    sizes = np.repeat(chunk, 2)
    positions = np.repeat(starts.ravel(), sizes) + ramp(sizes)
    samples = np.repeat(np.arange(lengths.size), 2 * chunk)
    index = np.where(positions < lengths[samples], first[samples] + positions, -1)
    tail = np.full(length // cp.size - index.size, -1, np.int64)
    return np.concatenate([index, tail])


def packed_responses(
    total_lengths: Sequence[int] | IntArray,
    response_lengths: Sequence[int] | IntArray,
    cp: ContextParallel,
    *,
    pad_multiple: int | None = None,
    stream_length: int | None = None,
    stream_offsets: Sequence[int] | IntArray | None = None,
) -> PackedResponses:
    """Return the response tokens this rank owns of a packed micro-batch, as flat arrays, in time
    linear in their number.

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
        packed_stream_length(padded, cp, stream_length)
        owned = owned_logits(
            totals, responses, cp, offsets=starts, stream_length=None, padded=padded
        )
        rows = owned.rows + (starts // cp.size)[owned.samples]
    else:
        offsets = starts if stream_offsets is None else int_array(stream_offsets)
        if offsets.shape != totals.shape:
            raise GeometryError(
                f"{offsets.size} stream offsets for {totals.size} samples; give one per sample"
            )
        if stream_offsets is None:
            stream_length = packed_stream_length(padded, cp, stream_length)
        owned = owned_logits(totals, responses, cp, offsets=offsets, stream_length=stream_length)
        rows = owned.rows
    first = np.cumsum(responses) - responses
    return PackedResponses(
        counts=owned.counts,
        samples=owned.samples,
        response_indices=owned.response_indices,
        flat_indices=first[owned.samples] + owned.response_indices,
        logit_rows=rows,
    )


def packed_response_rows(
    total_lengths: Sequence[int] | IntArray,
    response_lengths: Sequence[int] | IntArray,
    cp: ContextParallel,
    *,
    pad_multiple: int | None = None,
    stream_length: int | None = None,
) -> list[ResponseSlice]:
    """Return each sample's owned response tokens with rows of the PACKED LOCAL STREAM, ready to
    index a micro-batch's logits or hidden states.

    The stream is the one `packed_token_index` (and `rl_metrics.torch.slice_tokens`) makes with the
    same arguments.

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
    cuts = np.cumsum(owned.counts)[:-1]
    pieces = zip(
        np.split(owned.response_indices, cuts), np.split(owned.logit_rows, cuts), strict=True
    )
    slices = [ResponseSlice(response_indices=indices, logit_rows=rows) for indices, rows in pieces]
    return slices if owned.counts.size else []
