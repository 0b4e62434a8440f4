"""Metrics over the ranks of a group: two packed float64 all-reduces, keys checked on the way.

Layer: above ``wire`` (which decides what travels) and ``groups``.

Invariants, tested with real gloo: every rank gets the same records, equal to merging all ranks' records in one process; ranks that report
different metrics, or one that fails while preparing them, make EVERY rank raise an error that names rank and keys, so nobody hangs; the
number of collectives does not depend on the number of metrics (two, or three with more than 250 extrema).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from rl_metrics import wire
from rl_metrics.errors import KeyAgreementError, MetricsError
from rl_metrics.metric import Metric, merge_metrics
from rl_metrics.torch.groups import collective_device, group_rank, group_size, is_alone

__all__ = ["all_reduce_metrics", "reduce_prepared_metrics"]

_FAILED = -1.0
"""Digest of a rank that could not prepare its metrics; no real digest is negative."""


def all_reduce_metrics(
    metrics: Iterable[Metric] | Mapping[str, Metric],
    group: dist.ProcessGroup | None = None,
    *,
    dst: int | None = None,
) -> dict[str, Metric]:
    """Merge metrics over all ranks of a group.

    Every rank passes the same names, kinds and units, in any order; a rank without data for one passes :meth:`rl_metrics.Metric.empty`.
    Records of one name on one rank are merged first. In a mapping the key is the name.

    Args:
        metrics: the rank's records.
        group: ranks to merge over. Each contributes its own data: values that several ranks hold in full need
            :meth:`rl_metrics.Metric.replicated`.
        dst: global rank that wants the result. With it the sums travel to that rank only. None: everybody gets the result.

    Returns:
        name -> merged record, names sorted. Where no rank had data the record has weight 0 and the value None. On ranks other than ``dst``
        the sums are not meaningful, so the result is empty.

    Raises:
        KeyAgreementError: on every rank, when ranks disagree; it names the ranks and the keys.
        MetricsError: when this rank's records cannot be merged; the other ranks raise :class:`KeyAgreementError` naming this one.
    """
    return reduce_prepared_metrics(lambda: _named(metrics), group, dst=dst)


def reduce_prepared_metrics(
    prepare: Callable[[], Iterable[Metric]], group: dist.ProcessGroup | None = None, *, dst: int | None = None
) -> dict[str, Metric]:
    """As :func:`all_reduce_metrics`, with records made by a callable whose failure reaches all ranks instead of hanging them."""
    failure: Exception | None = None
    local: list[Metric] = []
    try:
        local = sorted(merge_metrics(prepare()).values(), key=lambda metric: metric.name)
    except Exception as error:
        # Whatever it is: the others wait for this rank in the next collective, and must hear of it there.
        failure = error
    if is_alone(group):
        if failure is not None:
            raise failure
        return {metric.name: metric for metric in local}
    agreed = _agree(local, failure, group)
    summed = _sum(wire.sums(local, agreed), group, dst)
    if dst is not None and dist.get_rank() != dst:
        return {}
    return {metric.name: metric for metric in wire.unpack(local, agreed, summed)}


def _named(metrics: Iterable[Metric] | Mapping[str, Metric]) -> list[Metric]:
    """Return the records, renamed to their keys where a mapping gives them."""
    if isinstance(metrics, Mapping):
        metrics = [replace(_checked(metric, name), name=name) for name, metric in metrics.items()]
    return [_checked(metric, "") for metric in metrics]


def _checked(metric: object, name: str) -> Metric:
    """Refuse a bare number: how it is to be merged would have to be guessed."""
    if not isinstance(metric, Metric):
        raise MetricsError(
            f"{name or 'a metric'}: got {type(metric).__name__}, whose way to merge is not declared; give a Metric, such as Metric.of_mean"
        )
    return metric


def _agree(local: list[Metric], failure: Exception | None, group: dist.ProcessGroup | None) -> npt.NDArray[np.float64]:
    """Return the extrema all ranks agree on, after checking that they report the same metrics."""
    payload = wire.extrema(local)
    key = wire.digest(local) if failure is None else _FAILED
    first = payload[: wire.HEAD_SIZE - 2]
    head = np.full(wire.HEAD_SIZE, -np.inf)
    head[:2] = key, -key
    head[2 : 2 + first.size] = first
    head = _reduce(head, dist.ReduceOp.MAX, group)
    if head[0] != -head[1] or failure is not None:
        _raise_disagreement(local, failure, group)
    rest = payload[first.size :]
    return np.concatenate([head[2 : 2 + first.size], _reduce(rest, dist.ReduceOp.MAX, group) if rest.size else rest])


def _raise_disagreement(local: list[Metric], failure: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Exchange what every rank reports and raise on all of them. Runs on the failing path only, where one more collective costs nothing."""
    reports: list[tuple[str | None, list[str]] | None] = [None] * group_size(group)
    dist.all_gather_object(reports, (None if failure is None else str(failure), [metric.describe() for metric in local]), group=group)
    if failure is not None:
        raise failure
    known = [entry for entry in reports if entry is not None]
    failed = [f"rank {rank} could not prepare its metrics: {message}" for rank, (message, _) in enumerate(known) if message is not None]
    if failed:
        raise KeyAgreementError(f"(this is rank {group_rank(group)} of the group) " + "; ".join(failed))
    reference = set(known[0][1])
    lines = []
    for rank, (_, keys) in enumerate(known):
        lacks, adds = sorted(reference - set(keys)), sorted(set(keys) - reference)
        if lacks or adds:
            lines.append(f"rank {rank} lacks {lacks} and adds {adds} compared with rank 0")
    raise KeyAgreementError(
        f"ranks of the group report different metrics: {'; '.join(lines)}. Report the same metrics everywhere; a rank without data passes Metric.empty"
    )


def _reduce(values: npt.NDArray[np.float64], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> npt.NDArray[np.float64]:
    """All-reduce a host vector."""
    tensor = torch.from_numpy(values).to(collective_device(group))
    dist.all_reduce(tensor, op=op, group=group)
    result: npt.NDArray[np.float64] = tensor.cpu().numpy()
    return result


def _sum(values: npt.NDArray[np.float64], group: dist.ProcessGroup | None, dst: int | None) -> npt.NDArray[np.float64]:
    """Sum a host vector over the group, for everybody or for ``dst``."""
    if not values.size:
        return values
    if dst is None:
        return _reduce(values, dist.ReduceOp.SUM, group)
    tensor = torch.from_numpy(values).to(collective_device(group))
    dist.reduce(tensor, dst=dst, op=dist.ReduceOp.SUM, group=group)
    result: npt.NDArray[np.float64] = tensor.cpu().numpy()
    return result
