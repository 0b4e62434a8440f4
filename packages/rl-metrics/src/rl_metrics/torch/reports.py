"""The train step's report and the rollout log's, reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist

from rl_metrics.aggregation import Aggregation
from rl_metrics.arguments import listed, number
from rl_metrics.errors import MetricsError
from rl_metrics.metric import Metric
from rl_metrics.reporting import report
from rl_metrics.step_report import (
    MicroBatchMetrics,
    finish_step_report,
    step_contributions,
    step_settings,
)
from rl_metrics.torch.collectives import all_reduce_metrics, reduce_prepared_metrics
from rl_metrics.torch.groups import group_size

__all__ = ["gather_and_reduce_log_dict", "reduce_train_step_metrics"]


def reduce_train_step_metrics(
    micro_batch_metrics: Sequence[MicroBatchMetrics],
    *,
    aggregation: Aggregation,
    step_units: float | None = None,
    cp_size: int,
    group: dist.ProcessGroup | None,
) -> dict[str, float | None]:
    """Return the report of one optimizer step, equal on all ranks and for every layout and
    micro-batch split.

    Call it where the loss is computed (the last pipeline stage), on every rank of `group`. One
    transfer from the device, two all-reduces.

    Args:
        micro_batch_metrics: one per micro-batch of this rank, in any order: what Megatron's
            forward-backward function returns.
        aggregation: one of the five, the same on all ranks.
        step_units: `U` of the whole step, the same on all ranks; not used by `token_mean`.
        cp_size: context-parallel ranks; divides the size of the group.
        group: the `dp_cp` group.

    Returns:
        name -> value, None where there is no data. Reducer outputs are divided by the step's units;
        further metrics report by kind.

    Raises:
        KeyAgreementError: on every rank the same, when ranks report different names or pass another
            aggregation, `step_units` or `cp_size`.
        MetricsError: when this rank's settings or numbers make no report: units that are not
            positive, a sum that is no single number, a token count that is none. The other ranks
            raise `KeyAgreementError` naming this one.
    """
    batches: list[MicroBatchMetrics] = []

    def prepare() -> tuple[list[Metric], dict[str, str]]:
        settings = step_settings(aggregation, step_units, cp_size)
        if group_size(group) % cp_size:
            raise MetricsError(
                f"cp_size is {cp_size}, but the group has {group_size(group)} ranks; pass the group"
                " over dp and cp together"
            )
        batches.extend(_checked(micro_batch_metrics))
        sums, tokens = _to_host(
            [batch.sums for batch in batches], [batch.num_tokens for batch in batches]
        )
        return step_contributions(sums, tokens, [batch.metrics for batch in batches]), settings

    reduced = reduce_prepared_metrics(prepare, group)
    names = set(batches[0].sums) if batches else set()
    return finish_step_report(
        reduced, names, aggregation=aggregation, step_units=step_units, cp_size=cp_size
    )


def gather_and_reduce_log_dict(
    log_dict: Mapping[str, Metric] | Iterable[Metric], *, group: dist.ProcessGroup | None, dst: int
) -> dict[str, float | None] | None:
    """Return the log lines of the whole group on rank `dst`, None on the others.

    Args:
        log_dict: name -> record, such as those of `rl_metrics.rollout_log_metric_contribution`. A
            bare number is refused: its kind would have to be guessed.
        group: every rank of it calls this, with the same names.
        dst: GLOBAL rank of the group that logs, as in `torch.distributed`, the same on all ranks; 0
            without any process group.

    Returns:
        name -> value (see `rl_metrics.Metric.report`), None standing for no data.

    Raises:
        KeyAgreementError: on every rank the same, when ranks report different metrics or name
            another `dst`.
        MetricsError: for a value without a kind, or a `dst` outside the group.
    """
    reduced = all_reduce_metrics(log_dict, group, dst=dst)
    alone = not (dist.is_available() and dist.is_initialized())
    return report(reduced.values()) if alone or dist.get_rank() == dst else None


def _checked(micro_batch_metrics: Iterable[Any]) -> list[MicroBatchMetrics]:
    """Return the records of the micro-batches, after checking that they are some."""
    batches = listed(micro_batch_metrics, "micro_batch_metrics")
    for k, batch in enumerate(batches):
        if not isinstance(batch, MicroBatchMetrics):
            raise MetricsError(
                f"micro-batch {k}: got {type(batch).__name__}; give MicroBatchMetrics(sums={{name:"
                " reducer output}, num_tokens=...)"
            )
    return batches


def _to_host(
    sums: Sequence[Mapping[str, SupportsFloat]], tokens: Sequence[SupportsFloat]
) -> tuple[list[dict[str, float]], list[float]]:
    """Return all numbers as floats, with a single transfer for all that lie on one device."""
    named = [
        (f"micro-batch {k}: {name!r}", value)
        for k, values in enumerate(sums)
        for name, value in values.items()
    ]
    named += [(f"micro-batch {k}: num_tokens", value) for k, value in enumerate(tokens)]
    numbers: list[float] = []
    tensors: list[torch.Tensor] = []
    places: list[int] = []
    for what, value in named:
        if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
            places.append(len(numbers))
            tensors.append(value.detach().to(torch.float64))
            numbers.append(0.0)
        else:
            numbers.append(number(value, what))
    # Values of one device travel together; micro-batches may leave numbers on several.
    for device in {tensor.device for tensor in tensors}:
        mine = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        for i, value in zip(mine, torch.stack([tensors[i] for i in mine]).tolist(), strict=True):
            numbers[places[i]] = value
    stream = iter(numbers)
    return [{name: next(stream) for name in values} for values in sums], list(stream)
