"""The policy loss of one optimizer step, as a loss function for a training pass.

Which log-probs the ratio is taken against, by `algorithm.old_log_probs`:
    recompute   those of a scoring pass before the batch's first step
    reuse       those of the training forward itself: the ratio is 1 and its gradient that of the log-prob (one step per batch)
    rollout     the engine's

Which scores of policy and reference the KL term compares: `algorithm.kl_log_probs`. The ratio and
the entropy bonus are always over the kept set.

Invariants: the scores in a micro-batch's `fields` are written once per batch and are the trainer's
under the weights that it first saw the tokens with: with `recompute` and `reuse`,
`fields["log_probs"]` is exactly what the loss used as old log-probs; with `rollout` it is that of
the first training forward, because the old ones are `rollout_log_probs` already. A scoring pass
asks for the same scores as training, so that both are computed alike.
"""

from __future__ import annotations

import torch

from rl_metrics import Aggregation, MicroBatchMetrics, megatron_loss_scale
from rl_metrics.torch import loss_reducer
from rl_runtime.config.algorithm import AlgorithmSection
from rl_runtime.training.micro_batch import MicroBatch
from rl_runtime.training.scores import ResponseScores, ScoreName
from rl_runtime.algorithms.losses import policy_loss
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.training.forward_backward import LossFunction
from rl_runtime.training.step_metrics import token_count, token_means

__all__ = ["policy_scores", "reference_score", "reinforcement_loss"]


def policy_scores(algorithm: AlgorithmSection) -> frozenset[ScoreName]:
    """Name the policy's scores that an algorithm computes of every token."""
    full: tuple[ScoreName, ...] = (
        ("full_log_probs", "full_entropy") if algorithm.full_scores else ()
    )
    return frozenset(("log_probs", "entropy", *full))


def reference_score(algorithm: AlgorithmSection) -> ScoreName:
    """Name the score of policy and reference that the KL term compares."""
    return "full_log_probs" if algorithm.kl_is_full else "log_probs"


def reinforcement_loss(
    algorithm: AlgorithmSection, *, num_microbatches: int, step_units: float, topology: Topology
) -> LossFunction:
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
        aggregation,
        num_microbatches=num_microbatches,
        step_units=step_units,
        dp_size=topology.dp_size,
        cp_size=topology.cp_size,
    )
    place = topology.context_parallel
    wanted = policy_scores(algorithm)

    def loss(batch: MicroBatch, scores: ResponseScores) -> tuple[torch.Tensor, MicroBatchMetrics]:
        for name in wanted:
            batch.fields.setdefault(name, scores[name].detach())
        kept = batch.fields["log_probs"]
        old = batch.fields["rollout_log_probs"] if algorithm.old_log_probs == "rollout" else kept
        terms = policy_loss(
            scores.log_probs,
            old,
            batch.fields["advantages"],
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            ref_log_probs=batch.fields.get("ref_log_probs"),
            kl_log_probs=scores[reference_score(algorithm)],
            kl_coef=algorithm.kl_coef,
            entropy=scores.entropy,
            entropy_coef=algorithm.entropy_coef,
        )
        reducer = loss_reducer(
            aggregation,
            batch.total_lengths,
            batch.response_lengths,
            batch.loss_masks,
            denominators=batch.denominators,
            cp=place,
        )
        reduced = reducer(terms.loss)
        train_log_probs = (
            kept if algorithm.old_log_probs == "recompute" else scores.log_probs.detach()
        )
        shown = {
            "ratio": terms.ratio,
            "clip_fraction": terms.clipped,
            "entropy": scores["entropy"].detach(),
            "log_prob_gap": (train_log_probs - batch.fields["rollout_log_probs"]).abs(),
        }
        if algorithm.full_scores:
            shown["full_entropy"] = scores["full_entropy"].detach()
        if terms.kl is not None:
            shown["kl"] = batch.fields["kl"] = terms.kl
        metrics = MicroBatchMetrics(
            sums={"loss": reduced.detach().clone()},
            num_tokens=batch.num_trained_tokens,
            metrics=[token_count(batch, topology.cp_size), *token_means(batch, shown)],
        )
        return reduced * scale, metrics

    return loss
