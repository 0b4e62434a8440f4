"""Metrics over the ranks of a group: two packed float64 all-reduces, keys checked on the way.

Invariants, tested with real gloo: every rank gets the same records, equal to merging all ranks'
records in one process; ranks that report different metrics or pass different settings, or one that
fails while preparing them, make EVERY rank raise an error that names them, so nobody hangs; the
number of collectives does not depend on the number of metrics (two, or three with more than 254
extrema); numbers on a device are not read before they are added up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from rl_metrics.arguments import FloatArray, count
from rl_metrics.errors import KeyAgreementError, MetricsError
from rl_metrics.metric import wire
from rl_metrics.metric.agreement import RankReport, disagreement
from rl_metrics.metric.metric import Metric
from rl_metrics.metric.reporting import merge_metrics
from rl_metrics.torch.groups import collective_device, group_members, group_size, is_alone
from rl_metrics.torch.tensor_metrics import Part, TensorMetric, added, split_records

__all__ = ["all_reduce_metrics", "raise_together", "reduce_prepared_metrics"]

_FAILED = -1.0
"""Digest of a rank that could not prepare its metrics; no real digest is negative."""


def all_reduce_metrics(
    metrics: Iterable[Metric | TensorMetric] | Mapping[str, Metric | TensorMetric],
    group: dist.ProcessGroup | None = None,
    *,
    dst: int | None = None,
) -> dict[str, Metric]:
    """Merge metrics over all ranks of a group.

    Every rank passes the same names, kinds and units, in any order; a rank without data for one
    passes `rl_metrics.Metric.empty`. Records of one name on one rank are merged first. In a mapping
    the key is the name.

    Numbers of a `rl_metrics.torch.TensorMetric` are not read on the host before they are added up;
    with NCCL the device is waited for once, for the result.

    Args:
        metrics: the rank's records, those of the host and those on a device.
        group: ranks to merge over. Each contributes its own data: values that several ranks hold in
            full need `rl_metrics.Metric.replicated`.
        dst: GLOBAL rank of the group that wants the result, the same on all ranks. With it the sums
            travel to that rank only. None: everybody gets the result.

    Returns:
        name -> merged record, names sorted. Where no rank had data the record has weight 0 and the
        value None. On ranks other than `dst` the sums are not meaningful, so the result is empty.

    Raises:
        KeyAgreementError: on every rank the same, when ranks disagree on metrics or on `dst`; it
            names the ranks and the keys.
        MetricsError: when this rank's records cannot be merged or its `dst` is outside the group;
            the other ranks raise `KeyAgreementError` naming this one. On every rank the same, when
            a histogram spans more than 2^20 buckets over all ranks.
    """
    return reduce_prepared_metrics(lambda: (metrics, {}), group, dst=dst)


def reduce_prepared_metrics(
    prepare: Callable[[], tuple[Any, Mapping[str, str]]],
    group: dist.ProcessGroup | None = None,
    *,
    dst: int | None = None,
) -> dict[str, Metric]:
    """As `all_reduce_metrics`, with records made by a callable whose failure reaches all ranks.

    Args:
        prepare: returns the rank's records as in `all_reduce_metrics`, and settings that must be
            equal on all ranks: name -> value as text.
        group: as in `all_reduce_metrics`.
        dst: as in `all_reduce_metrics`.

    Returns:
        As `all_reduce_metrics`.

    Raises:
        KeyAgreementError: as in `all_reduce_metrics`, also when settings differ.
    """
    failure: Exception | None = None
    local: list[Metric] = []
    parts: list[Part] = []
    settings: dict[str, str] = {}
    key, payload = _FAILED, np.empty(0)
    try:
        _check_dst(dst, group)
        records, wanted = prepare()
        records, parts = split_records(records, "metrics")
        local = sorted(merge_metrics(records).values(), key=lambda metric: metric.name)
        settings = {**wanted, "dst": str(dst)}
        payload, key = wire.extrema(local), wire.digest(local, settings)
    except Exception as error:
        # Whatever it is: the others wait for this rank in the next collective, and must hear of it
        # there.
        failure = error
    if is_alone(group):
        if failure is not None:
            raise failure
        if parts:
            summed = _laid_out(local, payload, parts, torch.device("cpu"))
            local = wire.unpack(local, payload, summed.numpy())
        return {metric.name: metric for metric in local}
    agreed = _agree(key, payload, group)
    if agreed is None:
        _raise_disagreement(local, settings, failure, group)
    summed = _laid_out(local, agreed, parts, collective_device(group))
    _add_up(summed, group, dst)
    if dst is not None and dist.get_rank() != dst:
        return {}
    return {metric.name: metric for metric in wire.unpack(local, agreed, summed.cpu().numpy())}


def raise_together(failure: Exception | None, group: dist.ProcessGroup | None) -> NoReturn:
    """Raise on every rank once one has found its numbers wrong: its own error, or who has one.

    Args:
        failure: what this rank found wrong, None for nothing.
        group: every rank of it calls this.

    Raises:
        KeyAgreementError: naming the ranks that failed, on those that did not.
    """
    if is_alone(group) and failure is not None:
        raise failure
    _raise_disagreement([], {}, failure, group)


def _laid_out(
    local: Sequence[Metric], agreed: FloatArray, parts: Iterable[Part], device: torch.device
) -> torch.Tensor:
    """Return the vector to sum, on the device where it travels, the numbers of tensors added."""
    starts = wire.places(local, agreed)
    numbers = [(starts[name] + offset, value) for name, offset, value in parts]
    return added(wire.sums(local, agreed), numbers, device)


def _check_dst(dst: int | None, group: dist.ProcessGroup | None) -> None:
    """Refuse a rank that is not in the group: the sums would be sent nowhere."""
    if dst is not None and count(dst, "dst", minimum=0) not in group_members(group):
        raise MetricsError(
            f"dst is {dst}; it is the GLOBAL rank that gets the result, so give one of"
            f" {group_members(group)}"
        )


def _agree(key: float, payload: FloatArray, group: dist.ProcessGroup | None) -> FloatArray | None:
    """Return the greatest extrema of all ranks; None when their keys differ or one has failed.

    Args:
        key: digest of what must be equal on all ranks, or `_FAILED`.
        payload: this rank's extrema, of a length that the digest covers.
        group: ranks to agree.
    """
    first, rest = np.split(payload, [wire.HEAD_SIZE - 2])
    head = np.full(wire.HEAD_SIZE, -np.inf)
    head[:2] = key, -key
    head[2 : 2 + first.size] = first
    head = _reduce(head, dist.ReduceOp.MAX, group)
    # The greatest key is the negative of the greatest negative exactly where all keys are equal.
    if head[0] != -head[1] or head[0] == _FAILED:
        return None
    agreed = head[2 : 2 + first.size]
    return np.concatenate([agreed, _reduce(rest, dist.ReduceOp.MAX, group)])


def _raise_disagreement(
    local: list[Metric],
    settings: dict[str, str],
    failure: Exception | None,
    group: dist.ProcessGroup | None,
) -> NoReturn:
    """Exchange what every rank reports and raise on all of them.

    Runs on the failing path only, where one more collective costs nothing.
    """
    mine = RankReport(
        failure=None if failure is None else str(failure) or type(failure).__name__,
        settings=settings,
        metrics=tuple(metric.describe() for metric in local),
    )
    reports: list[Any] = [None] * group_size(group)
    dist.all_gather_object(reports, mine, group=group)
    raise failure or KeyAgreementError(disagreement(reports))


def _reduce(
    values: FloatArray, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> FloatArray:
    """Reduce a host vector over the group; an empty one as it is."""
    if not values.size:
        return values
    device = collective_device(group)
    with _aside(device):
        tensor = torch.from_numpy(values).to(device, non_blocking=True)
        dist.all_reduce(tensor, op=op, group=group)
        result: FloatArray = tensor.cpu().numpy()
    return result


def _aside(device: torch.device) -> AbstractContextManager[Any]:
    """Return what runs a collective on a stream of its own.

    Reading its answer then waits for that stream alone, not for what training has yet to do.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _add_up(tensor: torch.Tensor, group: dist.ProcessGroup | None, dst: int | None = None) -> None:
    """Sum a vector over the group in place, for everybody or for `dst`; an empty one not at all."""
    if not tensor.numel():
        return
    if dst is None:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    else:
        dist.reduce(tensor, dst=dst, op=dist.ReduceOp.SUM, group=group)
