# Kernel arguments are device pointers and scalars, for which Python has no types; what each
# launcher takes is typed below.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""CUDA kernels of the output layer without logits: plain functions over device arrays, one launch
each.

Entries are a flat list of (row, id), each row's target first, as in `torch.entries`, in int32.
Sums run in float32 (float64 for float64 inputs). Invariants: no atomics and no order that depends
on timing, so results repeat bit for bit; every array element is written by exactly one program; id
-1 (other shard, or the target again) is never read.

How the weight's gradient, a sum over all rows that keep an id, gets enough parallel work: the
entries are sorted by id; one program owns each run of equal ids that begins among its few sorted
entries (how many runs there are is known on the device only, and programs without one cost time).
Common ids have long runs, so a first launch sums every aligned chunk of `CHUNK` sorted entries that
holds one id only, and the owner adds those partial sums to the few entries before and after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_topp.torch.upload import UploadedRows

__all__ = [
    "KernelShapes",
    "entry_coefficients",
    "entry_scores",
    "hidden_gradient",
    "list_entries",
    "row_statistics",
    "weight_gradient",
]

_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}
# Counts that differ in every call are not specialised, so that no call compiles a kernel anew.
_LANES = 32
"""Entries of one row handled at a time by the row kernels; most sets are smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShapes:
    """Tile sizes, powers of two.

    The defaults are the fastest of benchmarks/gpu_lm_head.py `--tune` on one H200.
    """

    score_entries: int = 4
    """Entries per program in forward."""
    score_block: int = 256
    """Elements of the inner dimension per step in forward."""
    hidden_entries: int = 1
    """Entries per step of a row's hidden-state gradient."""
    hidden_block: int = 1024
    """Elements per program of it."""
    weight_entries: int = 1
    """Entries per step of the weight's gradient."""
    weight_block: int = 1024
    """Elements per program of it."""
    weight_span: int = 4
    """Sorted entries per program of it: the program owns the ids whose runs begin there."""
    chunk: int = 64
    """Sorted entries per partial sum of the weight's gradient; a multiple of `weight_entries`."""


@triton.jit(do_not_specialize=["vocab_start", "num_local_ids"])
def _list_entries_kernel(
    ids,
    rows,
    starts,
    offsets,
    targets,
    out_ids,
    out_rows,
    vocab_start,
    num_local_ids,
    LANES: tl.constexpr,
):
    listed = tl.program_id(0)
    row = tl.load(rows + listed)
    start = tl.load(starts + listed)
    first = tl.load(offsets + listed)
    count = tl.load(offsets + listed + 1) - first - 1
    target = tl.load(targets + row).to(tl.int64)
    place = target - vocab_start
    tl.store(
        out_ids + first, tl.where((place >= 0) & (place < num_local_ids), place, -1).to(tl.int32)
    )
    tl.store(out_rows + first, row)
    for begin in range(0, count, LANES):
        lane = begin + tl.arange(0, LANES)
        inside = lane < count
        kept = tl.load(ids + start + lane, mask=inside, other=-1).to(tl.int64)
        places = kept - vocab_start
        here = (kept != target) & (places >= 0) & (places < num_local_ids)
        tl.store(out_ids + first + 1 + lane, tl.where(here, places, -1).to(tl.int32), mask=inside)
        tl.store(out_rows + first + 1 + lane, tl.zeros_like(lane) + row, mask=inside)


@triton.jit(do_not_specialize=["num_entries"])
def _entry_scores_kernel(
    hidden,
    weight,
    ids,
    rows,
    scores,
    num_entries,
    width,
    hidden_stride,
    weight_stride,
    WIDE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < num_entries
    place = tl.load(ids + entry, mask=inside, other=-1)
    row = tl.load(rows + entry, mask=inside, other=0)
    here = place >= 0
    left = hidden + row.to(tl.int64)[:, None] * hidden_stride
    right = weight + tl.where(here, place, 0).to(tl.int64)[:, None] * weight_stride
    total = tl.zeros((ENTRIES, BLOCK), WIDE)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = here[:, None] & (column < width)[None, :]
        a = tl.load(left + column[None, :], mask=mask, other=0.0).to(WIDE)
        b = tl.load(right + column[None, :], mask=mask, other=0.0).to(WIDE)
        total += a * b
    tl.store(scores + entry, tl.where(here, tl.sum(total, axis=1), float("-inf")), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _row_statistics_kernel(
    scores, rows, offsets, statistics, num_rows, WIDE: tl.constexpr, LANES: tl.constexpr
):
    listed = tl.program_id(0)
    first = tl.load(offsets + listed)
    stop = tl.load(offsets + listed + 1)
    peak = tl.full((), float("-inf"), WIDE)
    mass = tl.full((), 0.0, WIDE)
    spread = tl.full((), 0.0, WIDE)
    for begin in range(first, stop, LANES):
        place = begin + tl.arange(0, LANES)
        z = tl.load(scores + place, mask=place < stop, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(z, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shift = tl.where(mass > 0, peak - base, 0.0)
        scale = tl.where(mass > 0, tl.exp(shift), 0.0)
        distance = z - base
        part = tl.exp(distance)
        spread = (spread + shift * mass) * scale + tl.sum(
            tl.where(part > 0, part * distance, 0.0), axis=0
        )
        mass = mass * scale + tl.sum(part, axis=0)
        peak = higher
    out = statistics + tl.load(rows + listed)
    tl.store(out, peak)
    tl.store(out + num_rows, tl.load(scores + first))
    tl.store(out + 2 * num_rows, mass)
    tl.store(out + 3 * num_rows, spread)


@triton.jit
def _entry_coefficients_kernel(
    scores,
    ids,
    rows,
    offsets,
    upstream,
    upstream_entropy,
    log_normaliser,
    entropy,
    coefficients,
    WITH_ENTROPY: tl.constexpr,
    LANES: tl.constexpr,
):
    listed = tl.program_id(0)
    row = tl.load(rows + listed)
    first = tl.load(offsets + listed)
    stop = tl.load(offsets + listed + 1)
    gradient = tl.load(upstream + row)
    normaliser = tl.load(log_normaliser + row)
    for begin in range(first, stop, LANES):
        place = begin + tl.arange(0, LANES)
        inside = place < stop
        z = tl.load(scores + place, mask=inside, other=float("-inf"))
        log_p = z - normaliser
        p = tl.exp(log_p)
        value = gradient * (tl.where(place == first, 1.0, 0.0) - p)
        if WITH_ENTROPY:
            value -= tl.load(upstream_entropy + row) * tl.where(
                p > 0, p * (log_p + tl.load(entropy + row)), 0.0
            )
        here = tl.load(ids + place, mask=inside, other=-1) >= 0
        tl.store(coefficients + place, tl.where(here, value, 0.0), mask=inside)


@triton.jit
def _add_weighted_rows(
    total,
    matrix,
    index,
    coefficients,
    first,
    stop,
    columns,
    width,
    stride,
    WIDE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Add coefficients[k] * matrix[index[k], columns] for k in [first, stop) to total [ENTRIES, columns]; rows of coefficient 0 are not read."""
    for begin in range(first, stop, ENTRIES):
        place = begin + tl.arange(0, ENTRIES)
        inside = place < stop
        factor = tl.load(coefficients + place, mask=inside, other=0.0)
        row = tl.load(index + place, mask=inside, other=0)
        used = factor != 0
        source = matrix + tl.where(used, row, 0).to(tl.int64)[:, None] * stride + columns[None, :]
        values = tl.load(source, mask=used[:, None] & (columns < width)[None, :], other=0.0).to(
            WIDE
        )
        total += values * factor[:, None]
    return total


@triton.jit
def _add_to(out, columns, width, total, WIDE: tl.constexpr):
    """Add the column sums of total [ENTRIES, columns] to the array `out` of any dtype."""
    inside = columns < width
    old = tl.load(out + columns, mask=inside, other=0.0).to(WIDE)
    tl.store(out + columns, (old + tl.sum(total, axis=0)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _hidden_gradient_kernel(
    weight,
    ids,
    coefficients,
    rows,
    offsets,
    out,
    width,
    weight_stride,
    WIDE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    listed = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(offsets + listed)
    stop = tl.load(offsets + listed + 1)
    total = tl.zeros((ENTRIES, BLOCK), WIDE)
    total = _add_weighted_rows(
        total, weight, ids, coefficients, first, stop, columns, width, weight_stride, WIDE, ENTRIES
    )
    _add_to(out + tl.load(rows + listed).to(tl.int64) * width, columns, width, total, WIDE)


@triton.jit
def _weight_partials_kernel(
    hidden,
    ids,
    rows,
    coefficients,
    partials,
    width,
    hidden_stride,
    WIDE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    head = tl.load(ids + first)
    if (head >= 0) & (head == tl.load(ids + first + CHUNK - 1)):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((ENTRIES, BLOCK), WIDE)
        total = _add_weighted_rows(
            total,
            hidden,
            rows,
            coefficients,
            first,
            first + CHUNK,
            columns,
            width,
            hidden_stride,
            WIDE,
            ENTRIES,
        )
        tl.store(
            partials + chunk.to(tl.int64) * width + columns,
            tl.sum(total, axis=0),
            mask=columns < width,
        )


@triton.jit(do_not_specialize=["num_entries"])
def _weight_gradient_kernel(
    hidden,
    ids,
    ends,
    rows,
    coefficients,
    partials,
    out,
    num_entries,
    width,
    hidden_stride,
    out_stride,
    WIDE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    owned = tl.program_id(0) * SPAN
    for first in range(owned, tl.minimum(owned + SPAN, num_entries)):
        place = tl.load(ids + first)
        if place != tl.load(
            ids + first - 1, mask=first > 0, other=-1
        ):  # so the run of id -1 has no beginning
            stop = tl.load(ends + first)
            first_chunk = (first + CHUNK - 1) // CHUNK
            last_chunk = tl.maximum(stop // CHUNK, first_chunk)
            whole = last_chunk > first_chunk
            before = tl.where(whole, first_chunk * CHUNK, stop)
            after = tl.where(whole, last_chunk * CHUNK, stop)
            total = tl.zeros((ENTRIES, BLOCK), WIDE)
            total = _add_weighted_rows(
                total,
                hidden,
                rows,
                coefficients,
                first,
                before,
                columns,
                width,
                hidden_stride,
                WIDE,
                ENTRIES,
            )
            for begin in range(first_chunk, last_chunk, ENTRIES):
                chunk = begin + tl.arange(0, ENTRIES)
                source = partials + chunk.to(tl.int64)[:, None] * width + columns[None, :]
                total += tl.load(
                    source,
                    mask=(chunk < last_chunk)[:, None] & (columns < width)[None, :],
                    other=0.0,
                )
            total = _add_weighted_rows(
                total,
                hidden,
                rows,
                coefficients,
                after,
                stop,
                columns,
                width,
                hidden_stride,
                WIDE,
                ENTRIES,
            )
            _add_to(out + place.to(tl.int64) * out_stride, columns, width, total, WIDE)


def list_entries(
    lists: UploadedRows, targets_T: Tensor, *, vocab_start: int, num_local_ids: int
) -> tuple[Tensor, Tensor]:
    """Return ids [E] (relative to the shard, or -1) and rows [E] of the entries, int32.

    Args:
        lists: kept sets of the listed rows.
        targets_T: int32 or int64 [T], contiguous.
        vocab_start: first id of the shard.
        num_local_ids: ids of the shard.
    """
    ids_E, rows_E = (
        torch.empty(lists.num_entries, dtype=torch.int32, device=targets_T.device) for _ in range(2)
    )
    _list_entries_kernel[(lists.rows_R.numel(),)](
        lists.ids,
        lists.rows_R,
        lists.starts_R,
        lists.offsets_R1,
        targets_T,
        ids_E,
        rows_E,
        vocab_start,
        num_local_ids,
        LANES=_LANES,
        num_warps=1,
    )
    return ids_E, rows_E


def entry_scores(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    ids_E: Tensor,
    rows_E: Tensor,
    *,
    dtype: torch.dtype,
    shapes: KernelShapes,
) -> Tensor:
    """Return hidden .

    weight[id] per entry, [E], -inf where the id is -1. Both matrices have contiguous rows.
    """
    scores = torch.empty(ids_E.shape, dtype=dtype, device=ids_E.device)
    grid = (triton.cdiv(ids_E.numel(), shapes.score_entries),)
    _entry_scores_kernel[grid](
        hidden_TH,
        weight_VH,
        ids_E,
        rows_E,
        scores,
        ids_E.numel(),
        hidden_TH.shape[1],
        hidden_TH.stride(0),
        weight_VH.stride(0),
        WIDE=_WIDE[dtype],
        ENTRIES=shapes.score_entries,
        BLOCK=shapes.score_block,
    )
    return scores


def row_statistics(
    scores_E: Tensor, rows_R: Tensor, offsets_R1: Tensor, statistics_4T: Tensor
) -> None:
    """Write the statistics of `torch.scores` of each listed row; `statistics_4T` is contiguous."""
    grid = (rows_R.numel(),)
    _row_statistics_kernel[grid](
        scores_E,
        rows_R,
        offsets_R1,
        statistics_4T,
        statistics_4T.shape[1],
        WIDE=_WIDE[scores_E.dtype],
        LANES=_LANES,
        num_warps=1,
    )


def entry_coefficients(
    scores_E: Tensor,
    ids_E: Tensor,
    rows_R: Tensor,
    offsets_R1: Tensor,
    upstream_T: Tensor,
    upstream_entropy_T: Tensor | None,
    log_normaliser_T: Tensor,
    entropy_T: Tensor,
) -> Tensor:
    """Return dL/dz per entry, [E] (see `torch.scores.entry_gradient`; dL/d(logit) when the upstream is divided by the temperature); 0 where the id is -1. All row arrays are contiguous."""
    coefficients = torch.empty_like(scores_E)
    grid = (rows_R.numel(),)
    _entry_coefficients_kernel[grid](
        scores_E,
        ids_E,
        rows_R,
        offsets_R1,
        upstream_T,
        upstream_T if upstream_entropy_T is None else upstream_entropy_T,
        log_normaliser_T,
        entropy_T,
        coefficients,
        WITH_ENTROPY=upstream_entropy_T is not None,
        LANES=_LANES,
        num_warps=1,
    )
    return coefficients


def hidden_gradient(
    weight_VH: Tensor,
    ids_E: Tensor,
    coefficients_E: Tensor,
    rows_R: Tensor,
    offsets_R1: Tensor,
    out_TH: Tensor,
    *,
    shapes: KernelShapes,
) -> None:
    """Add sum of coefficient * weight[id] over each listed row's entries to `out_TH`, which is contiguous."""
    width = out_TH.shape[1]
    grid = (rows_R.numel(), triton.cdiv(width, shapes.hidden_block))
    _hidden_gradient_kernel[grid](
        weight_VH,
        ids_E,
        coefficients_E,
        rows_R,
        offsets_R1,
        out_TH,
        width,
        weight_VH.stride(0),
        WIDE=_WIDE[coefficients_E.dtype],
        ENTRIES=shapes.hidden_entries,
        BLOCK=shapes.hidden_block,
    )


def weight_gradient(
    hidden_TH: Tensor,
    ids_E: Tensor,
    rows_E: Tensor,
    coefficients_E: Tensor,
    out_VH: Tensor,
    *,
    shapes: KernelShapes,
) -> None:
    """Add sum of coefficient * hidden[row] over each id's entries to `out_VH`, whose rows are contiguous."""
    width, num_entries, wide = hidden_TH.shape[1], ids_E.numel(), coefficients_E.dtype
    ids, order = torch.sort(ids_E, stable=True)
    ends = torch.searchsorted(ids, ids, right=True, out_int32=True)
    rows, coefficients = rows_E[order], coefficients_E[order]
    num_chunks, column_blocks = num_entries // shapes.chunk, triton.cdiv(width, shapes.weight_block)
    partials = torch.empty(num_chunks, width, dtype=wide, device=ids.device)
    tiles = {
        "WIDE": _WIDE[wide],
        "ENTRIES": shapes.weight_entries,
        "BLOCK": shapes.weight_block,
        "CHUNK": shapes.chunk,
    }
    stride = hidden_TH.stride(0)
    if num_chunks:
        grid = (num_chunks, column_blocks)
        _weight_partials_kernel[grid](
            hidden_TH, ids, rows, coefficients, partials, width, stride, **tiles
        )
    grid = (triton.cdiv(num_entries, shapes.weight_span), column_blocks)
    lists = ids, ends, rows, coefficients, partials
    _weight_gradient_kernel[grid](
        hidden_TH,
        *lists,
        out_VH,
        num_entries,
        width,
        stride,
        out_VH.stride(0),
        **tiles,
        SPAN=shapes.weight_span,
    )
