"""Which rows of a packed stream attend to which.

A packed stream holds sequences end to end. Under context parallelism rank r holds chunks
`r` and `2 * cp - 1 - r` of each (zigzag). A *segment* is a run of local queries that attend
causally to a prefix of their sequence: all of it without context parallelism, one chunk with it.
Lengths are rounded up to powers of `2 ** (1/4)`, and segments of one rounded length share a dense
call.

Axes: T local tokens, S segments, B segments of one dense call, Q queries and K keys of a segment.

Invariants: every local row is the query of exactly one segment; a query attends to exactly the
tokens of its sequence up to its own position; padding wastes at most 41 % of a call's scores.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["AttentionPlan", "plan_attention"]

_IntArray = npt.NDArray[np.int64]
_DenseCall = tuple[_IntArray, _IntArray, npt.NDArray[np.bool_] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How one rank's attention over a packed stream is computed."""

    num_queries_S: _IntArray
    """int64 [S]: queries Q of each segment, in the order of local rows."""
    num_keys_S: _IntArray
    """int64 [S]: keys K >= Q of each segment. Its query i sees its first K - Q + i + 1 keys."""
    key_rows: _IntArray
    """int64 [sum of K]: rows of the keys in the stream gathered over context-parallel ranks.

    Segment by segment, in sequence order.
    """
    dense_calls: tuple[_DenseCall, ...]
    """Calls that cover all segments, padded to Q queries and K keys.

    Local rows of the queries, int64 [B, Q] (padding repeats the segment's first), rows of the
    gathered stream, int64 [B, K] (the same), and whether a query sees a key, bool [B, Q, K]; None:
    plain causal, Q equals K.
    """
    restore_T: _IntArray
    """int64 [T]: for each local row, its place in the calls' outputs laid end to end."""


def plan_attention(padded_lengths: Sequence[int], *, cp_size: int, cp_rank: int) -> AttentionPlan:
    """Plan the attention of one rank.

    Args:
        padded_lengths: tokens of each sequence over all ranks; each a positive multiple of
            `2 * cp_size` (of 1 where cp_size is 1).
        cp_size: context-parallel ranks.
        cp_rank: this rank.

    Returns:
        The plan. Lengths [3, 2] on one rank: segments of rows 0-2 and 3-4, each seeing itself
            causally.
    """
    segments = list(
        _whole_sequences(padded_lengths)
        if cp_size == 1
        else _zigzag_chunks(padded_lengths, cp_size, cp_rank)
    )
    num_queries_S = np.array([num_queries for num_queries, _ in segments], np.int64)
    num_keys_S = np.array([keys.size for _, keys in segments], np.int64)
    key_rows = np.concatenate([keys for _, keys in segments])
    # Where each segment begins, among the local rows and in `key_rows`.
    first_query_S, first_key_S = (np.cumsum(sizes) - sizes for sizes in (num_queries_S, num_keys_S))
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (num_queries, keys) in enumerate(segments):
        members[_rounded(num_queries), _rounded(keys.size)].append(index)
    restore_T = np.empty(num_queries_S.sum(), np.int64)
    dense_calls: list[_DenseCall] = []
    base = 0
    for (width, num_keys), found in sorted(members.items()):
        # The B segments of one call, as columns beside which Q and K broadcast.
        num_queries_B1, num_keys_B1 = num_queries_S[found, None], num_keys_S[found, None]
        query_Q, key_K = np.arange(width), np.arange(num_keys)
        is_query_BQ = query_Q < num_queries_B1
        query_rows_BQ = first_query_S[found, None] + np.where(is_query_BQ, query_Q, 0)
        places_BK = first_key_S[found, None] + np.where(key_K < num_keys_B1, key_K, 0)
        # The last query of a segment sees its last key. Padding queries see key 0: a row without
        # any visible key would be NaN.
        last_key_BQ = np.where(is_query_BQ, num_keys_B1 - num_queries_B1 + query_Q, 0)
        causal = np.array_equal(num_queries_B1, num_keys_B1)
        visible_BQK = None if causal else key_K <= last_key_BQ[:, :, None]
        dense_calls.append((query_rows_BQ, key_rows[places_BK], visible_BQK))
        # Outputs lie call by call, each call's B rows of Q end to end.
        restore_T[query_rows_BQ[is_query_BQ]] = base + np.flatnonzero(is_query_BQ)
        base += is_query_BQ.size
    return AttentionPlan(
        num_queries_S=num_queries_S,
        num_keys_S=num_keys_S,
        key_rows=key_rows,
        dense_calls=tuple(dense_calls),
        restore_T=restore_T,
    )


def _whole_sequences(lengths: Sequence[int]) -> Iterator[tuple[int, _IntArray]]:
    """Yield each segment's number of queries and its key rows."""
    for length, end in zip(lengths, np.cumsum(lengths).tolist(), strict=True):
        yield length, np.arange(end - length, end)


def _zigzag_chunks(
    lengths: Sequence[int], cp_size: int, cp_rank: int
) -> Iterator[tuple[int, _IntArray]]:
    """Yield the same of this rank's two chunks of every sequence."""
    local_length = sum(lengths) // cp_size
    local_start = 0
    for length in lengths:
        chunk = length // (2 * cp_size)
        rows = _gathered_rows(chunk, cp_size, local_start, local_length)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            # Chunk `index` sees all chunks before it, and itself causally.
            yield chunk, rows[: (index + 1) * chunk]
        local_start += 2 * chunk


def _gathered_rows(chunk: int, cp_size: int, local_start: int, local_length: int) -> _IntArray:
    """List one sequence's rows in the stream gathered rank by rank, in sequence order."""
    index = np.arange(2 * cp_size)
    # The zigzag folds back: chunks cp.. of a sequence are the second chunks of ranks cp - 1 .. 0.
    owner = np.where(index < cp_size, index, 2 * cp_size - 1 - index)
    first = owner * local_length + local_start + np.where(index < cp_size, 0, chunk)
    rows: _IntArray = (first[:, None] + np.arange(chunk)).reshape(-1)
    return rows


def _rounded(length: int) -> int:
    """Round up to a whole number near a power of 2 ** (1/4): 1 to 8, 10, 12, 14, 16, 20, ..."""
    # 1e-9: a power of two must not be rounded to the next step by floating point.
    step = math.ceil(4 * math.log2(length) - 1e-9)
    return max(length, math.ceil(2 ** (step / 4) - 1e-9))
