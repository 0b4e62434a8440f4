# Kernel arguments are device pointers and scalars, for which Python has no types; what each
# launcher takes is typed below. Counts that differ in every call are not specialised, so that no
# call compiles a kernel anew.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""CUDA kernels over single entries: their list, their scores, statistics and coefficients.

Plain functions over device arrays, one launch each. Entries are a flat list of (row, id), each
row's target first, as in `torch.entries`, in int32. Sums run in float32 (float64 for float64
inputs).

Axes: T rows of a call, R listed rows, E entries, V ids of the shard, H inner dimension.

Invariants: no atomics and no order that depends on timing, so results repeat bit for bit; every
array element is written by exactly one program; id -1 (other shard, or the target again) is never
read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_topp.torch.upload import UploadedRows

__all__ = [
    "WIDE",
    "KernelShapes",
    "entry_coefficients",
    "entry_scores",
    "list_entries",
    "row_statistics",
]

_LANES = 32
"""Entries of one row handled at a time by the row kernels; most sets are smaller."""
WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}
"""Dtype of Triton by the computing dtype of torch."""


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
        # Sums so far are rescaled to the new maximum; -inf - -inf would be NaN, hence the guards.
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
    """Return the dot product hidden[row] . weight[id] per entry, [E], -inf where the id is -1.

    Both matrices have contiguous rows.
    """
    scores = torch.empty(ids_E.shape, dtype=dtype, device=ids_E.device)
    _entry_scores_kernel[(triton.cdiv(ids_E.numel(), shapes.score_entries),)](
        hidden_TH,
        weight_VH,
        ids_E,
        rows_E,
        scores,
        ids_E.numel(),
        hidden_TH.shape[1],
        hidden_TH.stride(0),
        weight_VH.stride(0),
        WIDE=WIDE[dtype],
        ENTRIES=shapes.score_entries,
        BLOCK=shapes.score_block,
    )
    return scores


def row_statistics(
    scores_E: Tensor, rows_R: Tensor, offsets_R1: Tensor, statistics_4T: Tensor
) -> None:
    """Write the statistics of `torch.scores` of each listed row; `statistics_4T` is contiguous."""
    _row_statistics_kernel[(rows_R.numel(),)](
        scores_E,
        rows_R,
        offsets_R1,
        statistics_4T,
        statistics_4T.shape[1],
        WIDE=WIDE[scores_E.dtype],
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
    """Return dL/dz per entry, [E] (see `torch.scores.entry_gradient`); 0 where the id is -1.

    It is dL/d(logit) when the upstream is divided by the temperature. All row arrays are
    contiguous.
    """
    coefficients = torch.empty_like(scores_E)
    _entry_coefficients_kernel[(rows_R.numel(),)](
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
