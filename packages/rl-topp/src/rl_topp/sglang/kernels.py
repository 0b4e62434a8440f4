# Kernel arguments are device pointers and scalars, for which Python has no types; the launcher is
# typed.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Kept sets and sampling on CUDA without a full sort and without waiting for the device.

`torch.topk` gives each row's first 1,024 ids in order; `_draw_from_prefix` applies the rule of
`draw` to them and draws, and marks a row whose set may go on, or that has no filter. Then
`_draw_from_row` finds the smallest kept probability of the marked rows by bisection on the bits of
float32 (ordered like the numbers) and draws by the running sum.

Axes: B rows of the batch, V vocabulary, K ids of the prefix, W words of 32 ids, C step columns.

Invariants: a row's result depends on that row alone; the draw uses one uniform number per row, so
tensor-parallel ranks with equal random states agree.
"""

# Where the bisection ends: with n(x) ids and mass m(x) above x, the first id of probability v is
# kept iff n(v) < top_k and m(v) <= top_p. That holds from some smallest v upwards; of the ids equal
# to it, the first r = min(top_k - n, floor((top_p - m) / v) + 1) by id are kept.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_topp.sglang.draw import PREFIX_SIZE, Filters
from rl_topp.sglang.step import (
    COUNT,
    HEAD_SIZE,
    IDS,
    LOG_PROB,
    NUM_COLUMNS,
    WHOLE_VOCABULARY,
    WIDE,
    DrawnStep,
)

__all__ = ["draw_step_on_device"]

_COUNT, _LOG_PROB, _IDS = tl.constexpr(COUNT), tl.constexpr(LOG_PROB), tl.constexpr(IDS)
_WHOLE, _WIDE = tl.constexpr(WHOLE_VOCABULARY), tl.constexpr(WIDE)
_OPEN = tl.constexpr(-2)
"""Count of a row that `_draw_from_prefix` leaves to `_draw_from_row`."""

_BLOCK = 8192
"""Probabilities of one step through a row."""


def draw_step_on_device(
    probs_BV: Tensor,
    filters: Filters,
    uniform_B: Tensor,
    is_filtered_B: Tensor | None,
    *,
    prefix_size: int = PREFIX_SIZE,
    block: int = _BLOCK,
) -> DrawnStep:
    """Sample each row from its kept set, or from the vocabulary where it has no filter.

    Enqueues work and returns.

    Args:
        probs_BV: float32 [B, V] on the device, rows sum to 1 and are contiguous; not changed.
        filters: B rows, on the device.
        uniform_B: float32 [B], in [0, 1), on the device.
        is_filtered_B: bool [B] on the device; None: every row has a filter.
        prefix_size: ids looked at first.
        block: power of two, at least 32.
    """
    num_rows, vocab_size = probs_BV.shape
    width = min(prefix_size, vocab_size)
    sorted_BK, prefix_BK = torch.topk(probs_BV, width, dim=-1)
    ids_B = torch.empty(num_rows, dtype=torch.int32, device=probs_BV.device)
    packed_BC = torch.empty(num_rows, NUM_COLUMNS, dtype=torch.int32, device=probs_BV.device)
    num_words = triton.cdiv(vocab_size, 32)
    wide_BW = torch.empty(
        num_rows if vocab_size > width else 0, num_words, dtype=torch.int32, device=probs_BV.device
    )
    min_ps = filters.top_ps if filters.min_ps is None else filters.min_ps
    shared = {"V": vocab_size, "COLUMNS": NUM_COLUMNS, "HAS_MIN_P": filters.min_ps is not None}
    _draw_from_prefix[(num_rows,)](
        sorted_BK,
        prefix_BK,
        ids_B,
        packed_BC,
        filters.top_ks,
        filters.top_ps,
        min_ps,
        uniform_B,
        uniform_B if is_filtered_B is None else is_filtered_B,
        K=width,
        LANES=triton.next_power_of_2(width),
        HEAD=HEAD_SIZE,
        ALL_FILTERED=is_filtered_B is None,
        **shared,
    )
    if vocab_size > width or is_filtered_B is not None:
        _draw_from_row[(num_rows,)](
            probs_BV,
            probs_BV.stride(0),
            ids_B,
            packed_BC,
            wide_BW,
            filters.top_ks,
            filters.top_ps,
            min_ps,
            uniform_B,
            WORDS=num_words,
            BLOCK=min(block, max(32, triton.next_power_of_2(vocab_size))),
            num_warps=16,
            **shared,
        )
    return DrawnStep(ids_B=ids_B, packed_BC=packed_BC, prefix_BK=prefix_BK, wide_BW=wide_BW)


@triton.jit
def _draw_from_prefix(
    sorted_probs,
    sorted_ids,
    out_ids,
    packed,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    is_filtered,
    V: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    HEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    ALL_FILTERED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    probs = tl.load(sorted_probs + row * K + lane, mask=lane < K, other=0.0)
    sums = tl.cumsum(probs, 0)
    top_k = tl.load(top_ks + row)
    keep = (lane < top_k) & (sums - probs <= tl.load(top_ps + row)) & (probs > 0)
    if HAS_MIN_P:
        keep = keep & (probs >= tl.load(min_ps + row) * tl.max(probs, 0))
    count = tl.sum(keep.to(tl.int32), 0)
    is_open = (count == K) & (top_k > K) & (K < V)
    is_whole = False if ALL_FILTERED else tl.load(is_filtered + row) == 0
    mass = tl.sum(tl.where(keep, probs, 0.0), 0)
    target = tl.load(uniforms + row) * mass
    # The set is a prefix, so the rank drawn is the number of its running sums that the target has
    # reached.
    rank = tl.maximum(tl.minimum(tl.sum((keep & (sums <= target)).to(tl.int32), 0), count - 1), 0)
    chosen = tl.sum(tl.where(lane == rank, probs, 0.0), 0)
    tl.store(out_ids + row, tl.load(sorted_ids + row * K + rank).to(tl.int32))
    state = tl.where(is_whole, _WHOLE, tl.where(is_open, _OPEN, count))
    tl.store(packed + row * COLUMNS + _COUNT, state)
    tl.store(packed + row * COLUMNS + _LOG_PROB, tl.log(chosen / mass).to(tl.int32, bitcast=True))
    head = tl.arange(0, HEAD)
    ids = tl.load(sorted_ids + row * K + head, mask=head < count, other=0)
    tl.store(packed + row * COLUMNS + _IDS + head, ids.to(tl.int32))


@triton.jit
def _above(row_probs, bits, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return count and mass of the ids whose probability is above the one with these bits."""
    count = 0
    mass = 0.0
    for start in range(0, V, BLOCK):
        place = start + tl.arange(0, BLOCK)
        probs = tl.load(row_probs + place, mask=place < V, other=0.0)
        is_above = probs.to(tl.int32, bitcast=True) > bits
        count += tl.sum(is_above.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_above, probs, 0.0), 0)
    return count, mass


@triton.jit
def _nucleus_of_block(probs, bits, num_ties, ties_before, least):
    """Say of each id of a block whether it is kept, and count the ids at the boundary so far."""
    own = probs.to(tl.int32, bitcast=True)
    is_tie = (own == bits) & (probs > 0)
    ties = tl.cumsum(is_tie.to(tl.int32), 0)
    keep = ((own > bits) | (is_tie & (ties_before + ties <= num_ties))) & (probs >= least)
    return keep, ties_before + tl.sum(is_tie.to(tl.int32), 0)


@triton.jit
def _find_boundary(row_probs, top_k, top_p, V: tl.constexpr, BLOCK: tl.constexpr):
    """Find the smallest kept probability's bits, the number of its kept ids, and the largest."""
    largest = 0.0
    for start in range(0, V, BLOCK):
        place = start + tl.arange(0, BLOCK)
        largest = tl.maximum(
            largest, tl.max(tl.load(row_probs + place, mask=place < V, other=0.0), 0)
        )
    bits = 0
    high = tl.cast(largest, tl.int32, bitcast=True)
    while bits < high:
        middle = (bits + high) // 2
        count, mass = _above(row_probs, middle, V, BLOCK)
        if (count < top_k) & (mass <= top_p):
            high = middle
        else:
            bits = middle + 1
    count, mass = _above(row_probs, bits, V, BLOCK)
    boundary = tl.maximum(tl.cast(bits, tl.float32, bitcast=True), 1e-37)
    room = tl.cast(tl.minimum(tl.floor((top_p - mass) / boundary), 1.0 * V), tl.int32) + 1
    return bits, tl.minimum(top_k - count, room), largest


@triton.jit
def _sum_nucleus(
    row_probs,
    words,
    bits,
    num_ties,
    least,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return count and mass of the kept ids; their bits go to `words`."""
    ties, count, mass = 0, 0, 0.0
    for start in range(0, V, BLOCK):
        place = start + tl.arange(0, BLOCK)
        probs = tl.load(row_probs + place, mask=place < V, other=0.0)
        keep, ties = _nucleus_of_block(probs, bits, num_ties, ties, least)
        count += tl.sum(keep.to(tl.int32), 0)
        mass += tl.sum(tl.where(keep, probs, 0.0), 0)
        if WORDS > 0:
            lanes = tl.reshape(keep.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
            word = start // 32 + tl.arange(0, BLOCK // 32)
            tl.store(words + word, tl.sum(lanes, 1), mask=word < WORDS)
    return count, mass


@triton.jit
def _draw_from_nucleus(
    row_probs, target, bits, num_ties, least, V: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the first kept id whose running sum is above the target."""
    ties, drawn, last, running = 0, V, 0, 0.0
    for start in range(0, V, BLOCK):
        place = start + tl.arange(0, BLOCK)
        probs = tl.load(row_probs + place, mask=place < V, other=0.0)
        keep, ties = _nucleus_of_block(probs, bits, num_ties, ties, least)
        nucleus_probs = tl.where(keep, probs, 0.0)
        is_reached = keep & (running + tl.cumsum(nucleus_probs, 0) > target)
        drawn = tl.minimum(drawn, tl.min(tl.where(is_reached, place, V), 0))
        last = tl.maximum(last, tl.max(tl.where(keep, place, 0), 0))
        running += tl.sum(nucleus_probs, 0)
    # Rounding may leave the target unreached by the last sum.
    return tl.where(drawn == V, last, drawn)


@triton.jit
def _draw_from_row(
    probs_of_all,
    stride,
    out_ids,
    packed,
    wide,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(packed + row * COLUMNS + _COUNT)
    if state < 0:
        row_probs = probs_of_all + row * stride
        bits, num_ties, least = 0, 0, 0.0
        if state == _OPEN:
            bits, num_ties, largest = _find_boundary(
                row_probs, tl.load(top_ks + row), tl.load(top_ps + row), V, BLOCK
            )
            if HAS_MIN_P:
                least = tl.load(min_ps + row) * largest
            count, mass = _sum_nucleus(
                row_probs, wide + row * WORDS, bits, num_ties, least, V, WORDS, BLOCK
            )
            tl.store(packed + row * COLUMNS + _COUNT, count)
            tl.store(packed + row * COLUMNS + _IDS, _WIDE)
        else:
            count, mass = _sum_nucleus(row_probs, wide, bits, num_ties, least, V, 0, BLOCK)
        drawn = _draw_from_nucleus(
            row_probs, tl.load(uniforms + row) * mass, bits, num_ties, least, V, BLOCK
        )
        tl.store(out_ids + row, drawn)
        tl.store(
            packed + row * COLUMNS + _LOG_PROB,
            tl.cast(tl.log(tl.load(row_probs + drawn) / mass), tl.int32, bitcast=True),
        )
