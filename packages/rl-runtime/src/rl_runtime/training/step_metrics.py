"""What one optimizer step reports.

Invariants: every rank returns the same report; a name without data (no trained token in the step)
is absent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from rl_metrics import Aggregation, Metric, MicroBatchMetrics
from rl_metrics.torch import reduce_train_step_metrics
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.training.micro_batch import MicroBatch

__all__ = ["micro_batch_metrics", "step_report"]

_TOKENS = "tokens"
"""Name of the count that `tokens_per_second` is made of."""


def micro_batch_metrics(
    micro_batch: MicroBatch, loss: torch.Tensor, shown: Mapping[str, torch.Tensor], cp_size: int
) -> MicroBatchMetrics:
    """Collect what one micro-batch reports on one rank.

    Args:
        micro_batch: the micro-batch.
        loss: its reduced loss, before scaling, float32 [].
        shown: by name, float32 [K] without gradients; averaged over trained tokens.
        cp_size: context-parallel ranks.

    Returns:
        Sums and counts of this rank.
    """
    sums = [
        torch.where(micro_batch.trained_K, value_K, 0.0).sum(dtype=torch.float64)
        for value_K in shown.values()
    ]
    # One transfer from the device for all of them.
    *totals, count = torch.stack([*sums, micro_batch.trained_K.sum(dtype=torch.float64)]).tolist()
    return MicroBatchMetrics(
        sums={"loss": loss.detach().clone()},
        num_tokens=micro_batch.num_trained_tokens,
        metrics=[
            # Every context-parallel rank knows all lengths: shared out, so that the sum over ranks
            # counts each token once.
            Metric.of_sum(_TOKENS, float(micro_batch.total_lengths.sum()) / cp_size, unit="token"),
            *(
                Metric.of_mean(name, total, count, unit="token")
                for name, total in zip(shown, totals, strict=True)
            ),
        ],
    )


def step_report(
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

    Names and meaning, after the prefix `train/`:

        loss              the loss that was minimised, by `algorithm.loss_aggregation`
        ratio             exp(new - old log-prob)
        clip_fraction     share of tokens whose surrogate is clipped
        entropy           entropy of the policy over the nucleus, nats
        full_entropy      the same over the vocabulary; absent without `algorithm.full_scores`
        kl                k3 against the reference, nats, over what `algorithm.kl_log_probs` says;
                          absent without a reference
        log_prob_gap      |trainer - engine| log-prob, nats; the trainer's under the weights that
                          the batch began with where recomputed, else under those of the step
        grad_norm         gradient norm over all ranks, before clipping
        lr                learning rate of the step
        tokens_per_second tokens of all samples (prompt and response, without padding), over all
                          ranks, per wall second

    From ratio to log_prob_gap: means over the trained tokens of the step, so that a fully masked
    rollout moves none of them. The warm start reports loss, grad_norm, lr and tokens_per_second.

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
        # Only the last stage has losses; the other stages wait for its report.
        last = dist.get_global_rank(topology.pp_group, topology.pp_size - 1)
        dist.broadcast_object_list(
            reduced, src=last, group=topology.pp_group, device=topology.device
        )
    assert reduced[0] is not None
    found = {name: value for name, value in reduced[0].items() if value is not None}
    values = {**values, "tokens_per_second": found.pop(_TOKENS, 0.0) / seconds}
    return {f"{prefix}/{name}": value for name, value in {**found, **values}.items()}
