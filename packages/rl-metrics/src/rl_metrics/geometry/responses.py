"""Which context-parallel rank owns which response token, and where its logit lies there.

A sequence has `L` tokens, of which the last `R` are the response and the first `P = L - R` the
prompt. The logit at position `p` predicts token `p + 1`, so response token `j` (token `P + j`) is
predicted at position `P - 1 + j`, and the response has the positions `[P - 1, L - 1)`. Owning
response token `j` means owning that logit.

Invariants, tested: every response token has one owner; the ranks' response indices partition
`range(R)`; `response_owner` and `response_slice` agree; local rows address the tokens that
`packed_token_index` puts there. A rank may own no response token, and the last may lie on any rank.
Axes: N samples, K ranges of one sequence on one rank, T owned response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl_metrics.arguments import IntArray
from rl_metrics.errors import GeometryError
from rl_metrics.geometry.context_parallel import (
    ContextParallel,
    Layout,
    check_place,
    owned_ranges,
    single,
)

__all__ = [
    "PackedResponses",
    "ResponseSlice",
    "check_lengths",
    "owned_responses",
    "ramp",
    "response_owner",
    "response_slice",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSlice:
    """The response tokens one rank owns of one sample, none or more."""

    response_indices: IntArray
    """int64 [T]: indices `j` into the sample's response, ascending, 0-based.

    The order of every local response tensor.
    """

    logit_rows: IntArray
    """int64 [T]: the local row whose logit predicts response token `j`.

    What row 0 is depends on who made the slice: see there.
    """

    def __len__(self) -> int:
        """Count the owned response tokens."""
        return int(self.response_indices.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedResponses:
    """The response tokens one rank owns of a packed micro-batch, flat, sample after sample."""

    counts: IntArray
    """int64 [N]: owned response tokens per sample; may be 0."""

    samples: IntArray
    """int64 [T]: index of each owned token's sample in the micro-batch."""

    response_indices: IntArray
    """int64 [T]: index into that sample's response."""

    flat_indices: IntArray
    """int64 [T]: index into the concatenation of all FULL responses of the micro-batch."""

    logit_rows: IntArray
    """int64 [T]: row of the packed local stream whose logit predicts the token."""


def response_slice(
    total_length: int,
    response_length: int,
    cp: ContextParallel,
    *,
    stream_offset: int = 0,
    stream_length: int | None = None,
    padded_length: int | None = None,
) -> ResponseSlice:
    """Return the response tokens of one sample that this rank owns.

    What `logit_rows` index:

    - `zigzag`: rows of THIS SAMPLE'S local chunk, the `2 c` rows `concat(front chunk, back chunk)`
      that the rank holds of the sequence. Row 0 is the sample's first local token, wherever the
      sample lies in the packed stream. For rows of the packed local stream of a micro-batch use
      `rl_metrics.packed_response_rows`, which adds where each sample starts there. The stream
      arguments do not enter: zigzag cuts every sequence on its own.
    - `contiguous`: rows of the rank's part of the packed stream, that is, of the local stream
      itself.

    Args:
        total_length: `L`, tokens of prompt and response.
        response_length: `R`, tokens of the response, `0 <= R < L`.
        cp: the rank's place.
        stream_offset: as in `chunk_ranges`.
        stream_length: as in `chunk_ranges`.
        padded_length: as in `chunk_ranges`.

    Returns:
        The owned response indices, ascending, and their rows. Empty when the rank owns none.

    Raises:
        GeometryError: when the prompt is empty, a length is negative, or the stream arguments do
            not fit.

    Example:
        `L = 13, R = 5, C = 2`: the logits are positions 7..11. Rank 1 owns the tokens [4, 8) and
        [8, 12), hence all five, in rows 3, 4, 5, 6, 7; rank 0 owns none.
    """
    check_place(cp)
    owned = owned_responses(
        single(total_length, "total_length"),
        single(response_length, "response_length"),
        cp,
        offsets=single(stream_offset, "stream_offset"),
        stream_length=stream_length,
        padded=None if padded_length is None else single(padded_length, "padded_length", minimum=0),
    )
    return ResponseSlice(response_indices=owned.response_indices, logit_rows=owned.logit_rows)


def response_owner(
    total_length: int,
    response_length: int,
    j: int,
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    stream_offset: int = 0,
    stream_length: int | None = None,
) -> tuple[int, int]:
    """Return which rank owns response token `j`, and its index in that rank's response tensor.

    This is the answer to "where is the last response token" (`j = R - 1`): not always rank 0, and
    never "local index -1".

    Args:
        total_length: `L`, tokens.
        response_length: `R`, tokens.
        j: index of the response token, `0 <= j < R`.
        cp_size: `C`, ranks.
        layout: see `ContextParallel`.
        stream_offset: as in `chunk_ranges`.
        stream_length: as in `chunk_ranges`.

    Returns:
        `(rank, local_index)`, so that
        `response_slice(..., cp of that rank).response_indices[local_index] == j`.

    Raises:
        GeometryError: when `j` lies outside the response, for a `cp_size` below 1, or as in
            `response_slice`.

    Example:
        `response_owner(13, 5, 4, 2) == (1, 4)`.
    """
    size = ContextParallel(size=cp_size, layout=layout).size
    lengths = single(total_length, "total_length"), single(response_length, "response_length")
    check_lengths(*lengths)
    j = int(single(j, "j")[0])
    if not 0 <= j < response_length:
        raise GeometryError(
            f"response token {j} does not exist: the response has {response_length} tokens, so j"
            f" must lie in [0, {response_length})"
        )
    for rank in range(size):
        cp = ContextParallel(size=size, rank=rank, layout=layout)
        owned = response_slice(
            total_length,
            response_length,
            cp,
            stream_offset=stream_offset,
            stream_length=stream_length,
        )
        (places,) = np.nonzero(owned.response_indices == j)
        if places.size:
            return rank, int(places[0])
    raise AssertionError(f"no rank of {cp_size} owns response token {j} of {response_length}")


def owned_responses(
    total_lengths: IntArray,
    response_lengths: IntArray,
    cp: ContextParallel,
    *,
    offsets: IntArray,
    stream_length: int | None,
    padded: IntArray | None = None,
) -> PackedResponses:
    """Intersect the logits `[P - 1, L - 1)` of every sample with the rank's ranges, without a loop.

    Args:
        total_lengths: int64 [N].
        response_lengths: int64 [N].
        cp: the rank's place.
        offsets: int64 [N], start of each sequence in the packed stream (contiguous).
        stream_length: padded stream length (contiguous; not needed for one rank).
        padded: int64 [N], padded length of each sequence (zigzag); default: the smallest multiple
            of `2 C`.

    Returns:
        The owned tokens in sample order, ascending inside a sample. Rows are those of
        `response_slice`: of the sample's own chunk (zigzag), or of the rank's part of the stream.

    Raises:
        GeometryError: as in `response_slice`, naming the sample.
    """
    check_lengths(total_lengths, response_lengths)
    starts_NK, stops_NK = owned_ranges(
        total_lengths, cp, offsets=offsets, stream_length=stream_length, padded=padded
    )
    # The local row at which each range starts: ranges of a sequence lie one after the other.
    sizes_NK = stops_NK - starts_NK
    bases_NK = np.cumsum(sizes_NK, axis=1) - sizes_NK
    first_logits_N1 = (total_lengths - response_lengths - 1)[:, None]
    low_NK = np.maximum(starts_NK, first_logits_N1)
    owned_NK = np.maximum(np.minimum(stops_NK, total_lengths[:, None] - 1) - low_NK, 0)
    # Row-major order of [N, K] is that of the local stream: sample by sample, front before back.
    sizes = owned_NK.ravel()
    within_T = ramp(sizes)
    counts_N = owned_NK.sum(axis=1)
    samples_T = np.repeat(np.arange(total_lengths.size, dtype=np.int64), counts_N)
    indices_T = np.repeat((low_NK - first_logits_N1).ravel(), sizes) + within_T
    firsts_N = np.cumsum(response_lengths) - response_lengths
    return PackedResponses(
        counts=counts_N,
        samples=samples_T,
        response_indices=indices_T,
        flat_indices=firsts_N[samples_T] + indices_T,
        logit_rows=np.repeat((low_NK - starts_NK + bases_NK).ravel(), sizes) + within_T,
    )


def ramp(lengths: IntArray) -> IntArray:
    """Return `concat(arange(n) for n in lengths)`: lengths [2, 0, 3] give [0, 1, 0, 1, 2]."""
    firsts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(firsts, lengths)


def check_lengths(total_lengths: IntArray, response_lengths: IntArray) -> None:
    """Raise `GeometryError` unless each sample has a response length and a prompt token."""
    if total_lengths.shape != response_lengths.shape:
        raise GeometryError(
            f"{total_lengths.size} total lengths but {response_lengths.size} response lengths; give"
            " one of each per sample"
        )
    wrong = np.flatnonzero((response_lengths < 0) | (response_lengths >= total_lengths))
    if not wrong.size:
        return
    i = int(wrong[0])
    total, response = int(total_lengths[i]), int(response_lengths[i])
    if response < 0 or total < response:
        raise GeometryError(
            f"sample {i}: total_length {total}, response_length {response}; need 0 <="
            " response_length < total_length"
        )
    raise GeometryError(
        f"sample {i}: prompt length is 0 (total_length = response_length = {total}), so no logit"
        " predicts the first response token; give every sample at least one prompt token, such as"
        " the beginning-of-sequence token"
    )
