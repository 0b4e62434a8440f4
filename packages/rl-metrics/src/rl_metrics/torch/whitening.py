"""Advantage whitening over all ranks, exact for every layout.

Layer: above ``moments`` and ``groups``. Moments are taken in float64 in two passes on each rank and merged with Chan's formula, in rank order,
from one all-gather of three numbers; so all ranks compute the same statistics to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
import torch.distributed as dist

from rl_metrics.errors import MetricsError
from rl_metrics.moments import Moments, merge_moments
from rl_metrics.torch.groups import collective_device, group_rank, group_size, is_alone

__all__ = ["masked_moments", "masked_whiten"]


def masked_moments(
    values: torch.Tensor | Sequence[torch.Tensor], masks: torch.Tensor | Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> Moments:
    """Return count, mean and m2 of the trained entries over all ranks of a group, in float64.

    Args:
        values: this rank's disjoint part: a tensor, or one per sample; may be empty.
        masks: the same shapes; entries are trained where not zero.
        group: every rank of it calls this, with or without data.

    Returns:
        The merged moments, equal on all ranks.

    Raises:
        MetricsError: when shapes differ.
    """
    flat, trained = _flat(values, masks)
    chosen = flat.detach()[trained].to(torch.float64)
    count = chosen.numel()
    mean = chosen.mean() if count else chosen.new_zeros(())
    local = torch.stack([chosen.new_tensor(float(count)), mean, (chosen - mean).square().sum()])
    if is_alone(group):
        parts = [local]
    else:
        local = local.to(collective_device(group))
        parts = [torch.empty_like(local) for _ in range(group_size(group))]
        dist.all_gather(parts, local, group=group)
    rows = torch.stack(parts).tolist()
    return merge_moments(Moments(count=n, mean=mean, m2=m2) for n, mean, m2 in rows)


@overload
def masked_whiten(
    values: torch.Tensor, masks: torch.Tensor, group: dist.ProcessGroup | None = None, *, shift_mean: bool = True, epsilon: float = 1e-8
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
    """Return ``(x - mean) / sqrt(var + epsilon)`` with the mean and unbiased variance of all trained entries of all ranks.

    Args:
        values: this rank's disjoint part (its CP slice of its DP share): a tensor, or a list of one per sample; may be empty.
        masks: the same shapes; trained where not zero.
        group: data-parallel and context-parallel ranks together. Every rank must call, also one whose slice is empty.
        shift_mean: False divides only and keeps the mean.
        epsilon: added to the variance.

    Returns:
        As ``values``, in its dtype; 0 at masked entries, whatever they held.

    Raises:
        MetricsError: on every rank, when no entry of any rank is trained; or when shapes differ.

    Example:
        ``[1, 2, 3]`` all trained has mean 2 and variance 1, hence ``[-1, 0, 1]``.
    """
    moments = masked_moments(values, masks, group)
    if not moments.count:
        raise MetricsError(
            f"rank {group_rank(group)}: nothing to whiten, all {group_size(group)} ranks have only masked entries; "
            "skip whitening for a step without trained tokens"
        )
    variance = moments.variance(ddof=1 if moments.count > 1 else 0) or 0.0
    scale = (variance + epsilon) ** -0.5
    flat, trained = _flat(values, masks)
    shifted = flat.to(torch.float64) - moments.mean if shift_mean else flat.to(torch.float64)
    whitened = torch.where(trained, shifted * scale, 0.0).to(flat.dtype)
    if isinstance(values, torch.Tensor):
        return whitened.reshape(values.shape)
    pieces = torch.split(whitened, [value.numel() for value in values])
    return [piece.reshape(value.shape) for piece, value in zip(pieces, values, strict=True)]


def _flat(values: torch.Tensor | Sequence[torch.Tensor], masks: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and "is trained", flat."""
    xs = [values] if isinstance(values, torch.Tensor) else list(values)
    ms = [masks] if isinstance(masks, torch.Tensor) else list(masks)
    if len(xs) != len(ms):
        raise MetricsError(f"{len(xs)} value tensors but {len(ms)} masks; give one mask per tensor")
    for i, (x, m) in enumerate(zip(xs, ms, strict=True)):
        if not x.is_floating_point():
            raise MetricsError(f"sample {i}: values have dtype {x.dtype}; give floating-point values, such as x.float()")
        if x.shape != m.shape:
            raise MetricsError(f"sample {i}: values have shape {tuple(x.shape)} but the mask {tuple(m.shape)}")
    if not xs:
        return torch.empty(0), torch.empty(0, dtype=torch.bool)
    return torch.cat([x.reshape(-1) for x in xs]), torch.cat([m.reshape(-1) for m in ms]).ne(0)
