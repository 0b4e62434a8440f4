"""Which context-parallel rank owns which token, and where it lies there.

This module is the one place that knows the geometry. Everything that slices tokens, restores
responses or looks for "the last response token" asks here.

Words: a sequence has `L` tokens, of which the last `R` are the response and the first `P = L - R`
the prompt. The logit at position `p` predicts token `p + 1`, so response token `j` (token `P + j`)
is predicted by the logit at position `P - 1 + j`, and the logits of the response are the positions
`[P - 1, L - 1)`. Owning response token `j` means owning that logit.

Layouts over `C` ranks:

* `zigzag`: every sequence is padded on its own to `2 C c` tokens, `c = ceil(L / 2C)` unless the
padding is wider; rank `r` owns the
  ranges `[r c, (r+1) c)` and `[(2C-1-r) c, (2C-r) c)`, front then back, which evens out causal
  attention.
* `contiguous`: sequences lie back to back in one stream, padded at its end to a multiple of `C`;
rank `r` owns the `r`-th of `C`
  equal consecutive parts.

Invariants, each a test in `tests/property/test_geometry_laws.py`: every response token has exactly
one owner; the ranks' response indices partition `range(R)`; `response_owner` and `response_slice`
agree; local rows address exactly the tokens that `packed_token_index` puts there. A rank may own no
response token, and the last response token may lie on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rl_metrics.arguments import as_array, count
from rl_metrics.errors import GeometryError

__all__ = [
    "ContextParallel",
    "IntArray",
    "Layout",
    "ResponseSlice",
    "chunk_ranges",
    "response_owner",
    "response_slice",
]

IntArray = npt.NDArray[np.int64]
"""A numpy array of int64."""

Layout = Literal["zigzag", "contiguous"]
"""How a packed stream is cut over the context-parallel ranks."""


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """One rank's place in a context-parallel group: `ContextParallel(size=4, rank=1)`.

    The one record of this package that also takes its fields by position, in the order a reader
    says them: size, rank, layout.
    """

    size: int = 1
    """Number of ranks `C` that share each sequence, at least 1."""

    rank: int = 0
    """This rank's place in the group, `0 <= rank < size`."""

    layout: Layout = "zigzag"
    """`"zigzag"` (two mirrored chunks of every sequence) or `"contiguous"` (one part of the packed stream)."""

    def __post_init__(self) -> None:
        """Refuse a size, rank or layout that describes no place in a group; keep size and rank as Python integers."""
        object.__setattr__(
            self, "size", count(self.size, "context-parallel size", error=GeometryError)
        )
        object.__setattr__(
            self, "rank", count(self.rank, "context-parallel rank", minimum=0, error=GeometryError)
        )
        if self.rank >= self.size:
            raise GeometryError(
                f"context-parallel rank is {self.rank}; with size {self.size} it must lie in"
                f" 0..{self.size - 1}"
            )
        layout: object = self.layout
        if not isinstance(layout, str) or layout not in ("zigzag", "contiguous"):
            raise GeometryError(
                f"context-parallel layout is {self.layout!r}; use 'zigzag' or 'contiguous'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSlice:
    """The response tokens one rank owns of one sample.

    Both arrays have the same length, which may be 0.
    """

    response_indices: IntArray
    """int64 [n]: indices `j` into the sample's response, ascending, 0-based.

    The order of every local response tensor.
    """

    logit_rows: IntArray
    """int64 [n]: the local row whose logit predicts response token `j`.

    What row 0 is depends on who made the slice: see there.
    """

    def __len__(self) -> int:
        """Count the owned response tokens."""
        return int(self.response_indices.size)


def chunk_ranges(
    total_length: int,
    cp: ContextParallel,
    *,
    stream_offset: int = 0,
    stream_length: int | None = None,
    padded_length: int | None = None,
) -> tuple[tuple[int, int], ...]:
    """Return the half-open token ranges of a sequence that this rank owns, in the order they lie on
    the rank.

    Args:
        total_length: `L`, tokens of the sequence.
        cp: the rank's place.
        stream_offset: where the sequence starts in the packed stream, tokens. Read by `contiguous`
            only.
        stream_length: length of the padded packed stream, tokens, a multiple of `cp.size`. Required
            by `contiguous`.
        padded_length: length the sequence is padded to, a multiple of `2 * cp.size`; default: the
            smallest such length. Read by `zigzag` only.

    Returns:
        `zigzag`: two ranges of `c` positions each, which may reach past `L` into the padding.
            `contiguous`: one range clipped to
        the sequence, `(0, 0)` when the rank owns none of it.

    Raises:
        GeometryError: for lengths that are no integers, are negative, do not divide, or do not fit
            into the stream.

    Example:
        `L = 13, C = 2` gives `c = ceil(13 / 4) = 4`: rank 0 owns `((0, 4), (12, 16))` and rank 1
        `((4, 8), (8, 12))`.
    """
    check_place(cp)
    lengths = _one(total_length, "total_length")
    if cp.layout == "contiguous":
        offsets = _one(stream_offset, "stream_offset", minimum=None)
        part = contiguous_part(lengths, offsets, stream_length, cp)
        start = max(cp.rank * part - int(offsets[0]), 0)
        stop = min((cp.rank + 1) * part - int(offsets[0]), int(lengths[0]))
        return ((start, stop),) if start < stop else ((0, 0),)
    padded = None if padded_length is None else _one(padded_length, "padded_length")
    starts, chunk = zigzag_starts(lengths, padded, cp)
    return tuple((int(start), int(start + chunk[0])) for start in starts[0])


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

    * `zigzag`: rows of THIS SAMPLE'S local chunk, the `2 c` rows `concat(front chunk, back chunk)`
    that the rank holds of the sequence.
      Row 0 is the sample's first local token, wherever the sample lies in the packed stream. For
      rows of the packed local stream of a micro-batch use `rl_metrics.packed_response_rows`, which
      adds where each sample starts there. The stream arguments do not enter: zigzag cuts every
      sequence on its own.
    * `contiguous`: rows of the rank's part of the packed stream, that is, of the local stream
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
    owned = owned_logits(
        _one(total_length, "total_length", minimum=None),
        _one(response_length, "response_length", minimum=None),
        cp,
        offsets=_one(stream_offset, "stream_offset", minimum=None),
        stream_length=stream_length,
        padded=None if padded_length is None else _one(padded_length, "padded_length"),
    )
    return ResponseSlice(response_indices=owned.response_indices, logit_rows=owned.rows)


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
    """Return which rank owns response token `j`, and at which index of that rank's local response
    tensor it lies.

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
        `(rank, local_index)`, so that `response_slice(..., cp of that
        rank).response_indices[local_index] == j`.

    Raises:
        GeometryError: when `j` lies outside the response, for a `cp_size` below 1, or as in
            `response_slice`.

    Example:
        `response_owner(13, 5, 4, 2) == (1, 4)`.
    """
    size = ContextParallel(size=cp_size, layout=layout).size
    totals, responses = (
        _one(total_length, "total_length", minimum=None),
        _one(response_length, "response_length", minimum=None),
    )
    check_lengths(totals, responses)
    j = int(_one(j, "j", minimum=None)[0])
    if not 0 <= j < responses[0]:
        raise GeometryError(
            f"response token {j} does not exist: the response has {response_length} tokens, so j"
            f" must lie in [0, {response_length})"
        )
    position = int(totals[0] - responses[0]) - 1 + j
    for cp in [ContextParallel(size=size, rank=rank, layout=layout) for rank in range(size)]:
        ranges = chunk_ranges(
            total_length, cp, stream_offset=stream_offset, stream_length=stream_length
        )
        if any(start <= position < stop for start, stop in ranges):
            owned = response_slice(
                total_length,
                response_length,
                cp,
                stream_offset=stream_offset,
                stream_length=stream_length,
            )
            return cp.rank, int(np.searchsorted(owned.response_indices, j))
    raise AssertionError(
        f"no rank of {cp_size} owns position {position} of {total_length}: the ranges do not cover"
        " the sequence"
    )


def check_place(cp: ContextParallel) -> None:
    """Raise `GeometryError` for anything but a `ContextParallel`, such as the bare size of the group."""
    if not isinstance(cp, ContextParallel):
        raise GeometryError(
            f"cp is {cp!r} ({type(cp).__name__}); give this rank's place, ContextParallel(size,"
            " rank)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedLogits:
    """The owned response logits of several samples, flat, sample after sample."""

    counts: IntArray
    """int64 [N]: owned response tokens per sample."""

    samples: IntArray
    """int64 [n]: sample of each owned token."""

    response_indices: IntArray
    """int64 [n]: index into that sample's response."""

    rows: IntArray
    """int64 [n]: row in the sample's local chunk (zigzag) or in the rank's part of the stream (contiguous)."""


def owned_logits(
    total_lengths: IntArray,
    response_lengths: IntArray,
    cp: ContextParallel,
    *,
    offsets: IntArray,
    stream_length: int | None,
    padded: IntArray | None = None,
) -> OwnedLogits:
    """Intersect the logit window `[P - 1, L - 1)` of every sample with the rank's ranges, without a
    loop over samples.

    Args:
        total_lengths: int64 [N].
        response_lengths: int64 [N].
        cp: the rank's place.
        offsets: int64 [N], start of each sequence in the packed stream (contiguous).
        stream_length: padded stream length (contiguous).
        padded: int64 [N], padded length of each sequence (zigzag); default: the smallest multiple
            of `2 C`.

    Returns:
        The owned tokens in sample order, ascending inside a sample.

    Raises:
        GeometryError: as in `response_slice`, naming the sample.
    """
    check_lengths(total_lengths, response_lengths)
    if cp.layout == "contiguous":
        part = contiguous_part(total_lengths, offsets, stream_length, cp)
        starts = (cp.rank * part - offsets)[:, None]
        stops, bases = starts + part, np.zeros_like(starts)
    else:
        starts, chunk = zigzag_starts(total_lengths, padded, cp)
        stops = starts + chunk[:, None]
        bases = np.stack([np.zeros_like(chunk), chunk], axis=1)
    first_logits = (total_lengths - response_lengths - 1)[:, None]
    low = np.maximum(starts, first_logits)
    lengths = np.maximum(np.minimum(stops, total_lengths[:, None] - 1) - low, 0)
    flat = lengths.ravel()
    within = ramp(flat)
    indices = np.repeat((low - first_logits).ravel(), flat) + within
    rows = np.repeat((low - starts + bases).ravel(), flat) + within
    counts = lengths.sum(axis=1)
    samples = np.repeat(np.arange(total_lengths.size, dtype=np.int64), counts)
    return OwnedLogits(counts=counts, samples=samples, response_indices=indices, rows=rows)


def ramp(lengths: IntArray) -> IntArray:
    """Return `concat(arange(n) for n in lengths)`: lengths [2, 0, 3] give [0, 1, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if lengths.size else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - lengths, lengths)


def zigzag_starts(
    total_lengths: IntArray, padded: IntArray | None, cp: ContextParallel
) -> tuple[IntArray, IntArray]:
    """Return the starts of the two chunks, int64 [N, 2], and the chunk lengths, int64 [N]; `GeometryError` for a padding that cannot be cut."""
    pieces = 2 * cp.size
    if padded is None:
        chunk = -(-total_lengths // pieces)
    else:
        wrong = np.flatnonzero((padded % pieces != 0) | (padded < total_lengths))
        if wrong.size:
            i = int(wrong[0])
            raise GeometryError(
                f"sample {i}: padded length {padded[i]} for {total_lengths[i]} tokens; zigzag over"
                f" {cp.size} ranks needs a multiple of {pieces} that is at least the sequence"
                " length"
            )
        chunk = padded // pieces
    return np.stack([cp.rank * chunk, (pieces - 1 - cp.rank) * chunk], axis=1), chunk


def contiguous_part(
    total_lengths: IntArray, offsets: IntArray, stream_length: int | None, cp: ContextParallel
) -> int:
    """Return the tokens each rank holds of the stream; `GeometryError` unless it can be cut and holds every sequence, each apart."""
    if stream_length is None:
        raise GeometryError(
            "layout 'contiguous' needs stream_length, the length of the padded packed stream, and"
            " each sample's stream offset"
        )
    stream_length = count(stream_length, "stream_length", minimum=0, error=GeometryError)
    if stream_length % cp.size:
        raise GeometryError(
            f"stream_length is {stream_length}; it must be a multiple of the context-parallel size"
            f" {cp.size}: pad the stream"
        )
    wrong = np.flatnonzero((offsets < 0) | (offsets + total_lengths > stream_length))
    if wrong.size:
        i = int(wrong[0])
        raise GeometryError(
            f"sample {i}: {total_lengths[i]} tokens at stream offset {offsets[i]} do not fit into a"
            f" stream of {stream_length} tokens"
        )
    order = np.argsort(offsets, kind="stable")
    ends = (offsets + total_lengths)[order]
    wrong = np.flatnonzero(ends[:-1] > offsets[order][1:])
    if wrong.size:
        first, second = int(order[wrong[0]]), int(order[wrong[0] + 1])
        raise GeometryError(
            f"sample {second} starts at stream offset {offsets[second]}, but sample {first} takes"
            f" the stream up to {offsets[first] + total_lengths[first]}; samples of a stream must"
            " not overlap"
        )
    return stream_length // cp.size


def check_lengths(total_lengths: IntArray, response_lengths: IntArray) -> None:
    """Raise `GeometryError` for lists of different length, negative lengths, and samples without a prompt token, naming the sample."""
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


def int_array(values: Sequence[int] | IntArray) -> IntArray:
    """Return lengths as int64 [N]; `GeometryError` for anything that is not a flat list of integers."""
    array = as_array(values, "the list of lengths", error=GeometryError)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise GeometryError(
            f"lengths must be a flat list of integers, got shape {array.shape} of {array.dtype}"
        )
    return array.astype(np.int64)


def check_not_negative(lengths: IntArray) -> None:
    """Raise `GeometryError` naming the first sample whose length is negative."""
    wrong = np.flatnonzero(lengths < 0)
    if wrong.size:
        raise GeometryError(
            f"sample {wrong[0]}: length {lengths[wrong[0]]}; a sequence has 0 tokens or more"
        )


def _one(value: int, what: str, *, minimum: int | None = 0) -> IntArray:
    """Return one integer as int64 [1]; a fraction is refused rather than cut.

    Where `minimum` is None the caller checks the range.
    """
    bound = -(2**53) if minimum is None else minimum
    return np.array([count(value, what, minimum=bound, error=GeometryError)], np.int64)
