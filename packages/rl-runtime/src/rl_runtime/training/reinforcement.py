"""The policy loss of one optimizer step, as a loss function for a training pass. Layer: training, above `passes`.

Which log-probs the ratio is taken against, by `algorithm.old_log_probs`:
    recompute   those of a scoring pass before the batch's first step
    reuse       those of the training forward itself: the ratio is 1 and its gradient that of the log-prob (one step per batch)
    rollout     the engine's

Invariants: `fields["log_probs"]` of a micro-batch is written once per batch and holds the trainer's log-probs under the weights that it first saw
the tokens with: with `recompute` and `reuse` exactly what the loss used as old log-probs; with `rollout` those of the first training forward, because
the old ones are `rollout_log_probs` already.
"""

from __future__ import annotations

import torch

from rl_metrics import Aggregation, MicroBatchMetrics, megatron_loss_scale
from rl_metrics.torch import loss_reducer
from rl_runtime.config.algorithm import AlgorithmSection
from rl_runtime.training.batch import MicroBatch
from rl_runtime.training.log_probs import ResponseScores
from rl_runtime.training.loss import policy_loss
from rl_runtime.training.parallel_state import Topology
from rl_runtime.training.passes import LossFunction
from rl_runtime.training.reports import token_count, token_means

__all__ = ["reinforcement_loss"]


def reinforcement_loss(algorithm: AlgorithmSection, *, num_microbatches: int, step_units: float, topology: Topology) -> LossFunction:
    """Make the loss function of one step.

    Args:
        algorithm: which loss.
        num_microbatches: micro-batches of the step on each rank, fillers included.
        step_units: units of the step over all ranks, by the aggregation.
        topology: this rank's place.

    Returns:
        The loss function.
    """
    aggregation: Aggregation = algorithm.loss_aggregation
    scale = megatron_loss_scale(
        aggregation, num_microbatches=num_microbatches, step_units=step_units, dp_size=topology.dp_size, cp_size=topology.cp_size
    )
    place = topology.context_parallel

    def loss(batch: MicroBatch, scores: ResponseScores) -> tuple[torch.Tensor, MicroBatchMetrics]:
        current = scores.log_probs.detach()
        kept = batch.fields.setdefault("log_probs", current)
        old = batch.fields["rollout_log_probs"] if algorithm.old_log_probs == "rollout" else kept
        terms = policy_loss(
            scores.log_probs,
            old,
            batch.fields["advantages"],
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            ref_log_probs=batch.fields.get("ref_log_probs"),
            kl_coef=algorithm.kl_coef,
            entropy=scores.entropy,
            entropy_coef=algorithm.entropy_coef,
        )
        reducer = loss_reducer(
            aggregation, batch.total_lengths, batch.response_lengths, batch.loss_masks, denominators=batch.denominators, cp=place
        )
        reduced = reducer(terms.loss)
        train_log_probs = kept if algorithm.old_log_probs == "recompute" else current
        shown = {
            "ratio": terms.ratio,
            "clip_fraction": terms.clipped,
            "entropy": scores["entropy"].detach(),
            "log_prob_gap": (train_log_probs - batch.fields["rollout_log_probs"]).abs(),
        }
        if terms.kl is not None:
            shown["kl"] = terms.kl
        metrics = MicroBatchMetrics(
            sums={"loss": reduced.detach().clone()},
            num_tokens=batch.num_trained_tokens,
            metrics=[token_count(batch, topology.cp_size), *token_means(batch, shown)],
        )
        return reduced * scale, metrics

    return loss
