# Kernel arguments are device pointers and scalars, for which Python has no types; what each
# launcher takes is typed below. Counts that differ in every call are not specialised, so that no
# call compiles a kernel anew.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""CUDA kernels for the gradients of hidden states and weight, as sums over single entries.

How the weight's gradient, a sum over all rows that keep an id, gets enough parallel work: entries
are sorted by id, and one program owns each run of equal ids that begins among its few sorted
entries. Common ids have long runs, so a first launch sums every aligned chunk of `CHUNK` sorted
entries that holds one id only; the owner adds those to the few entries before and after them.

Axes: T rows of a call, R listed rows, E entries, V ids of the shard, H inner dimension.

Invariants: those of `triton_entries`. How many runs there are is known on the device only, and
programs without one cost time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_topp.lm_head.triton_entries import WIDE, KernelShapes

__all__ = ["hidden_gradient", "weight_gradient"]


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
    """Add coefficients[k] * matrix[index[k], columns] for k in [first, stop) to total.

    Total is [ENTRIES, columns]; rows of coefficient 0 are not read.
    """
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
    # Sorted: equal ends mean that the whole chunk holds one id.
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
        # A run begins here; before the first entry stands -1, so the run of id -1 has no beginning.
        if place != tl.load(ids + first - 1, mask=first > 0, other=-1):
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
    """Add coefficient * weight[id], summed over each row's entries, to contiguous `out_TH`."""
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
        WIDE=WIDE[coefficients_E.dtype],
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
    """Add coefficient * hidden[row], summed over each id's entries, to the rows of `out_VH`."""
    width, num_entries, wide = hidden_TH.shape[1], ids_E.numel(), coefficients_E.dtype
    ids, order = torch.sort(ids_E, stable=True)
    ends = torch.searchsorted(ids, ids, right=True, out_int32=True)
    rows, coefficients = rows_E[order], coefficients_E[order]
    num_chunks, column_blocks = num_entries // shapes.chunk, triton.cdiv(width, shapes.weight_block)
    partials = torch.empty(num_chunks, width, dtype=wide, device=ids.device)
    tiles = {
        "WIDE": WIDE[wide],
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
