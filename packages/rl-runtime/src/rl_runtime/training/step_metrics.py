"""What one optimizer step reports.

Names and meaning:
    train/loss              the loss that was minimised, by `algorithm.loss_aggregation`
    train/ratio             exp(new - old log-prob)
    train/clip_fraction     share of tokens whose surrogate is clipped
    train/entropy           entropy of the policy over the kept set, nats
    train/full_entropy      entropy of the policy over the vocabulary, nats; absent without `algorithm.full_scores`
    train/kl                k3 against the reference, nats, over what `algorithm.kl_log_probs` says; absent without a reference
    train/log_prob_gap      |trainer - engine| log-prob, nats; the trainer's under the weights that the batch began with where they were recomputed,
                            else under those of the step
    train/grad_norm         gradient norm over all ranks, before clipping
    train/lr                learning rate of the step
    train/tokens_per_second tokens of all samples (prompt and response, without padding), over all
    ranks, per wall second

From ratio to log_prob_gap: means over the trained tokens of the step, so that a fully masked
rollout moves none of them.

Invariants: every rank returns the same report; a name without data (no trained token in the step)
is absent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from rl_metrics import Aggregation, Metric, MicroBatchMetrics
from rl_metrics.torch import reduce_train_step_metrics
from rl_runtime.training.micro_batch import MicroBatch
from rl_runtime.megatron.parallel_state import Topology

__all__ = ["TOKENS", "finish_report", "token_count", "token_means"]

TOKENS = "tokens"
"""Name of the count that `tokens_per_second` is made of."""


def token_count(batch: MicroBatch, cp_size: int) -> Metric:
    """Count the tokens of a micro-batch's samples, shared out over context-parallel ranks so that the sum over ranks counts each once."""
    return Metric.of_sum(TOKENS, float(batch.total_lengths.sum()) / cp_size, unit="token")


def token_means(batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> list[Metric]:
    """Average values over trained tokens.

    Args:
        batch: the micro-batch.
        values: by name, float32 [K], without gradients.

    Returns:
        One record per name, with this rank's sum and count.
    """
    sums = [
        torch.where(batch.trained_K, value, 0.0).sum(dtype=torch.float64)
        for value in values.values()
    ]
    # One transfer from the device for all of them.
    *totals, count = torch.stack([*sums, batch.trained_K.sum(dtype=torch.float64)]).tolist()
    return [
        Metric.of_mean(name, total, count, unit="token")
        for name, total in zip(values, totals, strict=True)
    ]


def finish_report(
    metrics: list[MicroBatchMetrics],
    *,
    aggregation: Aggregation,
    step_units: float,
    topology: Topology,
    prefix: str,
    seconds: float,
    values: dict[str, float],
) -> dict[str, float]:
    """Reduce a step's metrics over all ranks. Every rank calls it.

    Args:
        metrics: one per micro-batch on the last pipeline stage, empty elsewhere.
        aggregation: how tokens become one number.
        step_units: units of the step over all ranks.
        topology: this rank's place.
        prefix: first part of the names, such as "train".
        seconds: wall time of the step.
        values: further values, the same on every rank.

    Returns:
        The report, equal on every rank.
    """
    reduced: list[dict[str, float | None] | None] = [None]
    if topology.is_last_stage:
        reduced[0] = reduce_train_step_metrics(
            metrics,
            aggregation=aggregation,
            step_units=step_units,
            cp_size=topology.cp_size,
            group=topology.dp_cp_group,
        )
    if topology.pp_size > 1:
        last = dist.get_global_rank(topology.pp_group, topology.pp_size - 1)
        dist.broadcast_object_list(
            reduced, src=last, group=topology.pp_group, device=topology.device
        )
    assert reduced[0] is not None
    found = {name: value for name, value in reduced[0].items() if value is not None}
    tokens = found.pop(TOKENS, 0.0)
    return {
        f"{prefix}/{name}": value
        for name, value in {**found, **values, "tokens_per_second": tokens / seconds}.items()
    }
