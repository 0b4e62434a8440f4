"""Advantage whitening over all ranks, exact for every layout.

Moments are taken in float64 in two passes on each rank, of values divided by a power of two near
the greatest (so that no square leaves float64), and merged with Chan's formula, in rank order, from
one all-gather of a few numbers; so all ranks compute the same statistics to the last bit. Whether
masks hold anything but 0 and 1 and which settings a rank passes travel with them. Axis: T entries
of this rank.

Invariants, tested with real gloo: one collective per call; a rank whose input is wrong, or ranks
that pass different settings, make every rank raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist

from rl_metrics.aggregation.masks import is_trained
from rl_metrics.arguments import finite_number, flag, listed
from rl_metrics.errors import MetricsError
from rl_metrics.metric.moments import Moments, merge_moments
from rl_metrics.torch.groups import collective_device, group_rank, group_size, is_alone

__all__ = ["masked_whiten"]

_FAILED = 1.0
"""Mark of a rank whose input is wrong; 0 is that of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one rank holds, as given and flat."""

    values: list[torch.Tensor]
    """Checked tensors of values."""

    masks: list[torch.Tensor]
    """Their masks, whose entries nobody has looked at."""

    flat: torch.Tensor
    """float [T]: all values."""

    mask: torch.Tensor
    """[T]: all mask entries."""

    @classmethod
    def of(cls, values: list[torch.Tensor], masks: list[torch.Tensor]) -> _Part:
        """Return the part of given tensors, of which there may be none."""
        flat, mask = (
            torch.cat([x.detach().reshape(-1) for x in (tensors or [torch.empty(0)])])
            for tensors in (values, masks)
        )
        return cls(values=values, masks=masks, flat=flat, mask=mask)


@overload
def masked_whiten(
    values: torch.Tensor,
    masks: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> torch.Tensor: ...


@overload
def masked_whiten(
    values: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> list[torch.Tensor]: ...


def masked_whiten(
    values: torch.Tensor | Sequence[torch.Tensor],
    masks: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> torch.Tensor | list[torch.Tensor]:
    """Return `(x - mean) / sqrt(var + epsilon)`, by the trained entries of all ranks.

    The variance is the unbiased one.

    Args:
        values: this rank's disjoint part (its CP slice of its DP share): a floating-point tensor,
            or a list of one per sample; may be empty.
        masks: the same shapes, of booleans or exactly 0 and 1; 1 is trained.
        group: data-parallel and context-parallel ranks together. Every rank must call, also one
            whose slice is empty.
        shift_mean: False divides only and keeps the mean. The same on all ranks.
        epsilon: added to the variance, in the square of the values' unit; finite, not negative, the
            same on all ranks.

    Returns:
        As `values`, in its dtype; 0 at masked entries, whatever they held. A constant for autograd,
        detached: advantages are no function of the parameters, and a gradient through this rank's
        part of the statistics would be a partial one.

    Raises:
        MetricsError: on every rank, when no entry of any rank is trained, all are equal under an
            epsilon of 0, shapes differ or a mask holds something else than 0 and 1 on one of them,
            or ranks pass different settings.

    Example:
        `[1, 2, 3]` all trained has mean 2 and variance 1, hence `[-1, 0, 1]`.
    """
    settings = {"shift_mean": shift_mean, "epsilon": epsilon}
    moments, scale, part = _moments_over_ranks(values, masks, group, settings)
    if not moments.count:
        raise MetricsError(
            f"rank {group_rank(group)}: nothing to whiten, all {group_size(group)} ranks have only"
            " masked entries; skip whitening for a step without trained tokens"
        )
    deviation = math.sqrt(moments.variance(ddof=1 if moments.count > 1 else 0) or 0.0) * scale
    # The root of a sum of squares without squaring: hypot neither overflows nor underflows.
    spread = math.hypot(deviation, math.sqrt(epsilon))
    if not spread:
        raise MetricsError(
            f"all {moments.count:g} trained entries are equal and epsilon is 0, so there is no"
            " scale; give an epsilon above 0"
        )
    wide = part.flat.to(torch.float64)
    shifted = wide - moments.mean * scale if shift_mean else wide
    whitened = torch.where(part.mask.ne(0), shifted / spread, 0.0).to(part.flat.dtype)
    pieces = torch.split(whitened, [x.numel() for x in part.values])
    shaped = [piece.reshape(x.shape) for piece, x in zip(pieces, part.values, strict=True)]
    return shaped[0] if isinstance(values, torch.Tensor) else shaped


def _moments_over_ranks(
    values: Any, masks: Any, group: dist.ProcessGroup | None, settings: dict[str, float]
) -> tuple[Moments, float, _Part]:
    """Return the moments of all ranks' values divided by a scale, the scale, and this rank's part.

    On the way every rank learns whether all are well and want the same.

    Args:
        values: as in `masked_whiten`, like the rest.
        masks: as there.
        group: as there.
        settings: what must be equal on all ranks: finite numbers of at least 0, or switches.
    """
    failure: Exception | None = None
    part = _Part.of([], [])
    wanted = [0.0] * len(settings)
    try:
        wanted = [finite_number(value, name, at_least=0.0) for name, value in settings.items()]
        flag(settings.get("shift_mean", True), "shift_mean")
        part = _part(values, masks)
    except Exception as error:
        # Whatever it is: the others wait for this rank in the all-gather, and must hear of it
        # there.
        failure = error
    local = _packed(part, failed=failure is not None, wanted=wanted)
    if is_alone(group):
        rows = [local.tolist()]
    else:
        local = local.to(collective_device(group))
        parts = [torch.empty_like(local) for _ in range(group_size(group))]
        dist.all_gather(parts, local, group=group)
        rows = torch.stack(parts).tolist()
    if failure is not None:
        raise failure
    if rows[group_rank(group)][3]:
        # Raises for the first wrong entry; to look at the masks costs nothing any more.
        for i, mask in enumerate(part.masks):
            is_trained(mask, f"sample {i}: the mask")
    failed = [rank for rank, row in enumerate(rows) if row[3]]
    if failed:
        raise MetricsError(
            f"rank {failed[0]} of {len(rows)} could not take part: values, masks or settings are"
            " wrong there; its own error says which"
        )
    for i, name in enumerate(settings, start=5):
        given = [row[i] for row in rows]
        if len(set(given)) > 1:
            raise MetricsError(
                f"ranks of the group disagree: {name} by rank is {given}. Pass the same value on"
                " every rank"
            )
    scale = max(row[4] for row in rows)
    # Quotients of powers of two: to bring all ranks to the greatest scale rounds nothing.
    merged = [
        Moments(count=row[0], mean=row[1] * (row[4] / scale), m2=row[2] * (row[4] / scale) ** 2)
        for row in rows
    ]
    return merge_moments(merged), scale, part


def _packed(part: _Part, *, failed: bool, wanted: list[float]) -> torch.Tensor:
    """Return what one rank tells the others, float64: count, mean, m2, mark, scale, settings.

    Mean and m2 are those of the values divided by the scale.
    """
    trained = part.mask.ne(0)
    chosen = part.flat[trained].to(torch.float64)
    one = chosen.new_ones(())
    top = chosen.abs().max() if chosen.numel() else one * 0.0
    # A power of two divides without rounding; the clamp keeps it a normal number. Without a value
    # other than 0 it is the smallest, so that this rank does not set the scale of the others.
    scale = torch.exp2(
        torch.where(top.isfinite() & (top > 0), top.log2().floor(), -1021.0).clamp(-1021, 1023)
    )
    scaled = chosen / scale
    mean = scaled.mean() if chosen.numel() else chosen.new_zeros(())
    # Only 0 and 1 equal their own truth value; nobody waits for the answer here.
    mark = one * _FAILED if failed else part.mask.ne(trained).any().to(torch.float64)
    return torch.stack(
        [
            one * chosen.numel(),
            mean,
            (scaled - mean).square().sum(),
            mark,
            scale,
            *chosen.new_tensor(wanted),
        ]
    )


def _part(values: Any, masks: Any) -> _Part:
    """Return one rank's part, after the checks that need no look at the numbers."""
    xs, ms = (
        [given]
        if isinstance(given, torch.Tensor)
        else listed(given, f"{name}, a tensor or one per sample")
        for name, given in (("values", values), ("masks", masks))
    )
    if len(xs) != len(ms):
        raise MetricsError(f"{len(xs)} value tensors but {len(ms)} masks; give one mask per tensor")
    for i, (x, m) in enumerate(zip(xs, ms, strict=True)):
        if not isinstance(x, torch.Tensor) or not isinstance(m, torch.Tensor):
            raise MetricsError(
                f"sample {i}: values are {type(x).__name__} and the mask {type(m).__name__}; give"
                " tensors"
            )
        if not x.is_floating_point():
            raise MetricsError(
                f"sample {i}: values have dtype {x.dtype}; give floating-point values, such as"
                " x.float()"
            )
        if x.shape != m.shape:
            raise MetricsError(
                f"sample {i}: values have shape {tuple(x.shape)} but the mask {tuple(m.shape)}"
            )
        if m.is_complex():
            raise MetricsError(
                f"sample {i}: the mask has dtype {m.dtype}; give booleans, or exactly 0 and 1"
            )
        if (x.dtype, x.device, m.device) != (xs[0].dtype, xs[0].device, xs[0].device):
            raise MetricsError(
                f"sample {i}: values are {x.dtype} on {x.device}, the mask is on {m.device}; give"
                " all on the device and in the dtype of sample 0's values"
            )
    return _Part.of(xs, ms)
