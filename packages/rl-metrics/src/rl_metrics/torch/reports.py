"""The train step's report and the rollout log's, reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist

from rl_metrics.aggregation.aggregation import Aggregation
from rl_metrics.arguments import listed
from rl_metrics.errors import MetricsError
from rl_metrics.metric.metric import Metric
from rl_metrics.metric.reporting import report
from rl_metrics.metric.step_report import (
    CONTRADICTIONS,
    MicroBatchMetrics,
    finish_step_report,
    step_settings,
)
from rl_metrics.torch.collectives import (
    all_reduce_metrics,
    raise_together,
    reduce_prepared_metrics,
)
from rl_metrics.torch.groups import group_size, has_no_group
from rl_metrics.torch.step_records import found_contradiction, step_records
from rl_metrics.torch.tensor_metrics import TensorMetric

__all__ = ["gather_and_reduce_log_dict", "reduce_train_step_metrics"]


def reduce_train_step_metrics(
    micro_batch_metrics: Sequence[MicroBatchMetrics],
    *,
    aggregation: Aggregation,
    step_units: float | None = None,
    cp_size: int,
    group: dist.ProcessGroup | None,
) -> dict[str, float | None]:
    """Return the report of one optimizer step, equal on all ranks, for every layout and split.

    Call it where the loss is computed (the last pipeline stage), on every rank of `group`. Two
    all-reduces; numbers on a device are not read before they are added up, so that the device is
    waited for once, at the end, where `group` reduces on the device (NCCL).

    Args:
        micro_batch_metrics: one per micro-batch of this rank, in any order: what Megatron's
            forward-backward function returns.
        aggregation: one of the five, the same on all ranks.
        step_units: `U` of the whole step, the same on all ranks; not used by `token_mean`.
        cp_size: context-parallel ranks; divides the size of the group.
        group: the `dp_cp` group.

    Returns:
        name -> value, None where there is no data. Reducer outputs are divided by the step's units,
        diagnostics by their own weight; further metrics report by kind.

    Raises:
        KeyAgreementError: on every rank the same, when ranks report different names or pass another
            aggregation, `step_units` or `cp_size`.
        MetricsError: when this rank's settings or numbers make no report: units that are not
            positive, a sum that is no single number, a token count that is none, sums without
            tokens. The other ranks raise `KeyAgreementError` naming this one.
    """
    batches: list[MicroBatchMetrics] = []

    def prepare() -> tuple[list[Metric | TensorMetric], dict[str, str]]:
        settings = step_settings(aggregation, step_units, cp_size)
        if group_size(group) % cp_size:
            raise MetricsError(
                f"cp_size is {cp_size}, but the group has {group_size(group)} ranks; pass the group"
                " over dp and cp together"
            )
        batches.extend(listed(micro_batch_metrics, "micro_batch_metrics"))
        for k, batch in enumerate(batches):
            if not isinstance(batch, MicroBatchMetrics):
                raise MetricsError(
                    f"micro-batch {k}: got {type(batch).__name__}; give MicroBatchMetrics(sums="
                    "{name: reducer output}, num_tokens=...)"
                )
        return step_records(batches), settings

    reduced = reduce_prepared_metrics(prepare, group)
    if reduced[CONTRADICTIONS].numerator:
        raise_together(found_contradiction(batches), group)
    names = set(batches[0].sums) if batches else set()
    return finish_step_report(
        reduced, names, aggregation=aggregation, step_units=step_units, cp_size=cp_size
    )


def gather_and_reduce_log_dict(
    log_dict: Mapping[str, Metric | TensorMetric] | Iterable[Metric | TensorMetric],
    *,
    group: dist.ProcessGroup | None,
    dst: int,
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
    return report(reduced.values()) if has_no_group(None) or dist.get_rank() == dst else None
