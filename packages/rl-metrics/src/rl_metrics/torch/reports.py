"""The train step's report and the rollout log's, reduced over ranks.

Layer: above ``collectives`` and the arithmetic of ``step_report`` and ``rollout_report``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsFloat

import torch
import torch.distributed as dist

from rl_metrics.aggregation import Aggregation
from rl_metrics.metric import Metric, report
from rl_metrics.step_report import MicroBatchMetrics, finish_step_report, step_contributions
from rl_metrics.torch.collectives import all_reduce_metrics, reduce_prepared_metrics

__all__ = ["gather_and_reduce_log_dict", "reduce_train_step_metrics"]


def reduce_train_step_metrics(
    micro_batch_metrics: Sequence[MicroBatchMetrics],
    *,
    aggregation: Aggregation,
    step_units: float | None = None,
    cp_size: int,
    group: dist.ProcessGroup | None,
) -> dict[str, float | None]:
    """Return the report of one optimizer step, equal on all ranks and for every layout and micro-batch split.

    Call it where the loss is computed (the last pipeline stage), on every rank of ``group``. One transfer from the device, two all-reduces.

    Args:
        micro_batch_metrics: one per micro-batch of this rank, in any order: what Megatron's forward-backward function returns.
        aggregation: one of the five.
        step_units: ``U`` of the whole step; not used by ``token_mean``.
        cp_size: context-parallel ranks.
        group: the ``dp_cp`` group.

    Returns:
        name -> value, None where there is no data. Reducer outputs are divided by the step's units; further metrics report by kind.

    Raises:
        KeyAgreementError: on every rank, when micro-batches or ranks report different names.
        MetricsError: for missing units.
    """
    sums, tokens = _to_host([batch.sums for batch in micro_batch_metrics], [batch.num_tokens for batch in micro_batch_metrics])
    extra = [batch.metrics for batch in micro_batch_metrics]
    reduced = reduce_prepared_metrics(lambda: step_contributions(sums, tokens, extra), group)
    names = set(sums[0]) if sums else set()
    return finish_step_report(reduced, names, aggregation=aggregation, step_units=step_units, cp_size=cp_size)


def gather_and_reduce_log_dict(
    log_dict: Mapping[str, Metric] | Iterable[Metric], *, group: dist.ProcessGroup | None, dst: int
) -> dict[str, float | None] | None:
    """Return the log lines of the whole group on rank ``dst``, None on the others.

    Args:
        log_dict: name -> record, such as those of :func:`rl_metrics.rollout_log_metric_contribution`. A bare number is refused: its kind
            would have to be guessed.
        group: every rank of it calls this, with the same names.
        dst: GLOBAL rank that logs, as in ``torch.distributed``.

    Returns:
        name -> value (see :meth:`rl_metrics.Metric.report`), None standing for no data.

    Raises:
        KeyAgreementError: on every rank, when ranks report different metrics.
        MetricsError: for a value without a kind.
    """
    reduced = all_reduce_metrics(log_dict, group, dst=dst)
    alone = not (dist.is_available() and dist.is_initialized())
    return report(reduced.values()) if alone or dist.get_rank() == dst else None


def _to_host(sums: Sequence[Mapping[str, SupportsFloat]], tokens: Sequence[SupportsFloat]) -> tuple[list[dict[str, float]], list[float]]:
    """Return all numbers as floats, with a single transfer for all that lie on a device."""
    flat = [value for values in sums for value in values.values()] + list(tokens)
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    numbers = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in flat]
    tensors = [value.detach().reshape(()).to(torch.float64) for value in flat if isinstance(value, torch.Tensor)]
    for place, number in zip(places, torch.stack(tensors).tolist() if tensors else [], strict=True):
        numbers[place] = number
    stream = iter(numbers)
    return [{name: next(stream) for name in values} for values in sums], list(stream)
