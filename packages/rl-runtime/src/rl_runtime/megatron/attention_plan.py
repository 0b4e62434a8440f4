"""Which rows of a packed stream attend to which.

A packed stream holds sequences end to end, each padded to a multiple of 2 * cp. Under context
parallelism rank r holds chunks r and 2 * cp - 1 - r of each sequence (zigzag). A *segment* is a run
of consecutive local queries that attend causally to a prefix of their sequence: the whole sequence
without context parallelism, one chunk with it. The segment's last query sees the prefix's last key.

Segments of similar length form a *bucket*, which is one dense attention call: lengths are rounded
up to powers of 2 ** (1/4), which wastes at most 41 % of its scores, and some 20 % on average.

Invariants: every local row is the query of exactly one segment; a query attends to exactly the
tokens of its sequence up to its own position.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["AttentionPlan", "Bucket", "Segment", "plan_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive local queries and the keys they see."""

    first_query: int
    """Local row of the first query."""
    num_queries: int
    """Number of queries Q."""
    keys: npt.NDArray[np.int64]
    """int64 [K], K >= Q: rows of the keys in the stream gathered over context-parallel ranks, in sequence order. Query i sees keys[: K - Q + i + 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One dense attention call over B segments, padded to Q queries and K keys."""

    query_rows: npt.NDArray[np.int64]
    """int64 [B, Q]: local rows; padding repeats the segment's first row."""
    key_rows: npt.NDArray[np.int64]
    """int64 [B, K]: rows of the gathered stream; padding repeats the segment's first key."""
    visible: npt.NDArray[np.bool_] | None
    """bool [B, Q, K]: whether a query sees a key; None: plain causal, Q equals K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How one rank's attention over a packed stream is computed."""

    segments: tuple[Segment, ...]
    """In the order of local rows."""
    buckets: tuple[Bucket, ...]
    """Dense calls that cover all segments."""
    restore: npt.NDArray[np.int64]
    """int64 [T]: for each local row, its place in the buckets' outputs laid end to end."""


def plan_attention(padded_lengths: Sequence[int], *, cp_size: int, cp_rank: int) -> AttentionPlan:
    """Plan the attention of one rank.

    Args:
        padded_lengths: tokens of each sequence over all ranks; each a positive multiple of 2 *
            cp_size (of 1 where cp_size is 1).
        cp_size: context-parallel ranks.
        cp_rank: this rank.

    Returns:
        The plan. Lengths [3, 2] on one rank: segments of rows 0-2 and 3-4, each seeing itself
            causally.
    """
    segments = (
        _whole_sequences(padded_lengths)
        if cp_size == 1
        else _zigzag_chunks(padded_lengths, cp_size, cp_rank)
    )
    groups: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        groups[_rounded(segment.num_queries), _rounded(segment.keys.size)].append(segment)
    restore = np.empty(sum(segment.num_queries for segment in segments), np.int64)
    buckets = []
    base = 0
    for (num_queries, num_keys), members in sorted(groups.items()):
        buckets.append(_bucket(members, num_queries, num_keys))
        for index, segment in enumerate(members):
            rows = np.arange(segment.num_queries)
            restore[segment.first_query + rows] = base + index * num_queries + rows
        base += len(members) * num_queries
    return AttentionPlan(segments=tuple(segments), buckets=tuple(buckets), restore=restore)


def _whole_sequences(lengths: Sequence[int]) -> list[Segment]:
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    return [
        Segment(first_query=int(start), num_queries=length, keys=np.arange(start, start + length))
        for start, length in zip(starts, lengths, strict=True)
    ]


def _zigzag_chunks(lengths: Sequence[int], cp_size: int, cp_rank: int) -> list[Segment]:
    local_length = sum(lengths) // cp_size
    segments = []
    local_start = 0
    for length in lengths:
        chunk = length // (2 * cp_size)
        rows = _gathered_rows(chunk, cp_size, local_start, local_length)
        for half, index in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
            segments.append(
                Segment(
                    first_query=local_start + half * chunk,
                    num_queries=chunk,
                    keys=rows[: (index + 1) * chunk],
                )
            )
        local_start += 2 * chunk
    return segments


def _gathered_rows(
    chunk: int, cp_size: int, local_start: int, local_length: int
) -> npt.NDArray[np.int64]:
    """Rows, in the stream gathered rank by rank, of one sequence's tokens in sequence order."""
    index = np.arange(2 * cp_size)
    owner = np.where(index < cp_size, index, 2 * cp_size - 1 - index)
    first = owner * local_length + local_start + np.where(index < cp_size, 0, chunk)
    rows: npt.NDArray[np.int64] = (first[:, None] + np.arange(chunk)).reshape(-1)
    return rows


def _rounded(length: int) -> int:
    """Smallest whole number that is at least `length` and a rounded-up power of 2 ** (1/4): 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..."""
    step = math.ceil(4 * math.log2(length) - 1e-9)
    return max(length, math.ceil(2 ** (step / 4) - 1e-9))


def _bucket(members: list[Segment], num_queries: int, num_keys: int) -> Bucket:
    causal = all(segment.num_queries == segment.keys.size for segment in members)
    query_rows = np.empty((len(members), num_queries), np.int64)
    key_rows = np.empty((len(members), num_keys), np.int64)
    last_key = np.zeros((len(members), num_queries), np.int64)
    for index, segment in enumerate(members):
        count = segment.num_queries
        query_rows[index] = segment.first_query
        query_rows[index, :count] += np.arange(count)
        key_rows[index] = segment.keys[0]
        key_rows[index, : segment.keys.size] = segment.keys
        last_key[index, :count] = segment.keys.size - count + np.arange(count)
    visible = None if causal else np.arange(num_keys) <= last_key[:, :, None]
    return Bucket(query_rows=query_rows, key_rows=key_rows, visible=visible)
