"""A rank's place in a context-parallel group, and which part of every sequence it owns.

A sequence has `L` tokens. Layouts over `C` ranks:

- `zigzag`: every sequence is padded on its own to `2 C c` tokens, `c = ceil(L / 2C)` unless the
  padding is wider. Rank `r` owns the ranges `[r c, (r+1) c)` and `[(2C-1-r) c, (2C-r) c)`, front
  then back, which evens out causal attention.
- `contiguous`: sequences lie back to back in one stream, padded at its end to a multiple of `C`.
  Rank `r` owns the `r`-th of `C` equal consecutive parts.

Everything that slices tokens, restores responses or looks for "the last response token" asks the
modules of this folder. Axes: N samples, K ranges of one sequence on one rank (2 or 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_metrics.arguments import IntArray, as_array, count
from rl_metrics.errors import GeometryError

__all__ = [
    "ContextParallel",
    "Layout",
    "check_place",
    "chunk_ranges",
    "int_array",
    "owned_ranges",
    "single",
]

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
    """`"zigzag"` (two chunks of every sequence) or `"contiguous"` (one part of the stream)."""

    def __post_init__(self) -> None:
        """Refuse what describes no place in a group; keep size and rank as Python integers."""
        for field, minimum in (("size", 1), ("rank", 0)):
            what = f"context-parallel {field}"
            value = count(getattr(self, field), what, minimum=minimum, error=GeometryError)
            object.__setattr__(self, field, value)
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


def chunk_ranges(
    total_length: int,
    cp: ContextParallel,
    *,
    stream_offset: int = 0,
    stream_length: int | None = None,
    padded_length: int | None = None,
) -> tuple[tuple[int, int], ...]:
    """Return the half-open token ranges of a sequence that this rank owns, in their order there.

    Args:
        total_length: `L`, tokens of the sequence.
        cp: the rank's place.
        stream_offset: where the sequence starts in the packed stream, tokens. Read by `contiguous`
            only.
        stream_length: length of the padded packed stream, tokens, a multiple of `cp.size`. Required
            by `contiguous` over two ranks or more; one rank owns every token whatever the length.
        padded_length: length the sequence is padded to, a multiple of `2 * cp.size`; default: the
            smallest such length. Read by `zigzag` only.

    Returns:
        `zigzag`: two ranges of `c` positions each, which may reach past `L` into the padding.
        `contiguous`: one range clipped to the sequence, `(0, 0)` when the rank owns none of it.

    Raises:
        GeometryError: for lengths that are no integers, are negative, do not divide, or do not fit
            into the stream.

    Example:
        `L = 13, C = 2` gives `c = ceil(13 / 4) = 4`: rank 0 owns `((0, 4), (12, 16))` and rank 1
        `((4, 8), (8, 12))`.
    """
    check_place(cp)
    starts_NK, stops_NK = owned_ranges(
        single(total_length, "total_length", minimum=0),
        cp,
        offsets=single(stream_offset, "stream_offset"),
        stream_length=stream_length,
        padded=None if padded_length is None else single(padded_length, "padded_length", minimum=0),
    )
    if cp.layout == "contiguous":
        start, stop = max(int(starts_NK[0, 0]), 0), min(int(stops_NK[0, 0]), total_length)
        return ((start, stop),) if start < stop else ((0, 0),)
    return tuple(zip(starts_NK[0].tolist(), stops_NK[0].tolist(), strict=True))


def owned_ranges(
    total_lengths: IntArray,
    cp: ContextParallel,
    *,
    offsets: IntArray,
    stream_length: int | None = None,
    padded: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Return where the rank's ranges of each sequence start and stop, in tokens of the sequence.

    Args:
        total_lengths: int64 [N].
        cp: the rank's place.
        offsets: int64 [N], start of each sequence in the packed stream (contiguous).
        stream_length: padded stream length (contiguous; not needed for one rank).
        padded: int64 [N], padded length of each sequence (zigzag); default: the smallest multiple
            of `2 C`.

    Returns:
        Starts and stops, int64 [N, K], not clipped: zigzag ranges reach into the padding, that of a
        contiguous stream before and past the sequence.

    Raises:
        GeometryError: when a padding or the stream cannot be cut or does not hold the sequences.
    """
    if cp.layout == "contiguous":
        part = _contiguous_part(total_lengths, offsets, stream_length, cp.size)
        starts_NK = (cp.rank * part - offsets)[:, None]
        return starts_NK, starts_NK + part
    chunk_N = _zigzag_chunks(total_lengths, padded, cp.size)
    mirrored = 2 * cp.size - 1 - cp.rank
    starts_NK = np.stack([cp.rank * chunk_N, mirrored * chunk_N], axis=1)
    return starts_NK, starts_NK + chunk_N[:, None]


def _zigzag_chunks(total_lengths: IntArray, padded: IntArray | None, size: int) -> IntArray:
    """Return the chunk length of each sequence, int64 [N]."""
    pieces = 2 * size
    if padded is None:
        # Minus twice: floor division rounds down, a chunk must be rounded up.
        return -(-total_lengths // pieces)
    wrong = np.flatnonzero((padded % pieces != 0) | (padded < total_lengths))
    if wrong.size:
        i = int(wrong[0])
        raise GeometryError(
            f"sample {i}: padded length {padded[i]} for {total_lengths[i]} tokens; zigzag over"
            f" {size} ranks needs a multiple of {pieces} that is at least the sequence length"
        )
    return padded // pieces


def _contiguous_part(
    total_lengths: IntArray, offsets: IntArray, stream_length: int | None, size: int
) -> int:
    """Return the tokens each rank holds of the stream, which must hold every sequence apart."""
    if stream_length is None and size == 1:
        # One rank owns the whole stream: where it ends decides nothing.
        stream_length = int(np.max(offsets + total_lengths, initial=0))
    if stream_length is None:
        raise GeometryError(
            "layout 'contiguous' needs stream_length, the length of the padded packed stream, and"
            " each sample's stream offset"
        )
    stream_length = count(stream_length, "stream_length", minimum=0, error=GeometryError)
    if stream_length % size:
        raise GeometryError(
            f"stream_length is {stream_length}; it must be a multiple of the context-parallel size"
            f" {size}: pad the stream"
        )
    wrong = np.flatnonzero((offsets < 0) | (offsets + total_lengths > stream_length))
    if wrong.size:
        i = int(wrong[0])
        raise GeometryError(
            f"sample {i}: {total_lengths[i]} tokens at stream offset {offsets[i]} do not fit into a"
            f" stream of {stream_length} tokens"
        )
    # Sequences may be given in any order; in that of the stream only neighbours can overlap.
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
    return stream_length // size


def check_place(cp: ContextParallel) -> None:
    """Raise `GeometryError` for anything but a `ContextParallel`, such as the size of the group."""
    if not isinstance(cp, ContextParallel):
        raise GeometryError(
            f"cp is {cp!r} ({type(cp).__name__}); give this rank's place, ContextParallel(size,"
            " rank)"
        )


def int_array(values: Sequence[int] | IntArray) -> IntArray:
    """Return lengths as int64 [N]; `GeometryError` for anything but a flat list of integers."""
    array = as_array(values, "the list of lengths", error=GeometryError)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise GeometryError(
            f"lengths must be a flat list of integers, got shape {array.shape} of {array.dtype}"
        )
    return array.astype(np.int64)


def single(value: int, what: str, *, minimum: int = -(2**53)) -> IntArray:
    """Return one integer as int64 [1]; a fraction is refused rather than cut.

    Args:
        value: a Python or numpy integer.
        what: subject of the error.
        minimum: smallest that passes; default: the caller checks the range.
    """
    return np.array([count(value, what, minimum=minimum, error=GeometryError)], np.int64)
