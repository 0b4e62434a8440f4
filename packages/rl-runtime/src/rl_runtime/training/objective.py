"""The loss of one optimizer step, as a loss function for a training pass.

`algorithm.old_log_probs` says what the ratio is taken against: log-probs of a scoring pass before
the batch's first step (recompute), those of the training forward itself, where the ratio is 1
(reuse), or the engine's (rollout). The KL term compares the scores that `algorithm.kl_log_probs`
names; ratio and entropy bonus are always over the nucleus.

Axes: K local response tokens.

Invariants: a score in a micro-batch's `fields` is written once per batch, by the first pass that
computes it, so it is under the weights of that pass; a scoring pass asks for the same scores as
training, so that both are computed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rl_metrics import Aggregation, MicroBatchMetrics, megatron_loss_scale
from rl_metrics.torch import loss_reducer
from rl_runtime.algorithms.losses import policy_loss
from rl_runtime.config.algorithm import AlgorithmSection
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.training.forward_backward import LossFunction
from rl_runtime.training.micro_batch import MicroBatch
from rl_runtime.training.scores import ResponseScores, ScoreName
from rl_runtime.training.step_metrics import micro_batch_metrics

__all__ = ["policy_objective", "policy_scores", "reference_score", "sft_objective"]

TokenLosses = Callable[
    [MicroBatch, ResponseScores], tuple[torch.Tensor, Mapping[str, torch.Tensor]]
]
"""Loss of each token.

Takes a micro-batch and its scores; returns the losses, float32 [K], and what the report shows of
each token, by name, float32 [K].
"""


def policy_scores(algorithm: AlgorithmSection) -> frozenset[ScoreName]:
    """Name the policy's scores that an algorithm computes of every token."""
    full: tuple[ScoreName, ...] = (
        ("full_log_probs", "full_entropy") if algorithm.full_scores else ()
    )
    return frozenset(("log_probs", "entropy", *full))


def reference_score(algorithm: AlgorithmSection) -> ScoreName:
    """Name the score of policy and reference that the KL term compares."""
    return "full_log_probs" if algorithm.kl_is_full else "log_probs"


def _step_objective(
    token_losses: TokenLosses,
    aggregation: Aggregation,
    *,
    num_microbatches: int,
    step_units: float,
    topology: Topology,
) -> LossFunction:
    """Make the loss function of one step out of the loss of a token.

    Args:
        token_losses: the loss of each token.
        aggregation: how tokens become one number.
        num_microbatches: micro-batches of the step on each rank, fillers included.
        step_units: units of the step over all ranks, by the aggregation.
        topology: this rank's place.

    Returns:
        The loss function.
    """
    # What undoes Megatron-Core's own division by micro-batches and ranks.
    scale = megatron_loss_scale(
        aggregation,
        num_microbatches=num_microbatches,
        step_units=step_units,
        dp_size=topology.dp_size,
        cp_size=topology.cp_size,
    )

    def objective(
        micro_batch: MicroBatch, scores: ResponseScores
    ) -> tuple[torch.Tensor, MicroBatchMetrics]:
        losses_K, shown = token_losses(micro_batch, scores)
        reduced = loss_reducer(
            aggregation,
            micro_batch.total_lengths,
            micro_batch.response_lengths,
            micro_batch.loss_masks,
            denominators=micro_batch.denominators,
            cp=topology.context_parallel,
        )(losses_K)
        return reduced * scale, micro_batch_metrics(micro_batch, reduced, shown, topology.cp_size)

    return objective


def policy_objective(
    algorithm: AlgorithmSection, *, num_microbatches: int, step_units: float, topology: Topology
) -> LossFunction:
    """Make the loss function of one step of policy optimization.

    Args:
        algorithm: which loss.
        num_microbatches: micro-batches of the step on each rank, fillers included.
        step_units: units of the step over all ranks, by the aggregation.
        topology: this rank's place.

    Returns:
        The loss function.
    """

    def token_losses(
        micro_batch: MicroBatch, scores: ResponseScores
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        fields = micro_batch.fields
        for name in policy_scores(algorithm):
            fields.setdefault(name, scores[name].detach())
        first_log_probs, rollout_log_probs = fields["log_probs"], fields["rollout_log_probs"]
        loss = policy_loss(
            scores.log_probs,
            rollout_log_probs if algorithm.old_log_probs == "rollout" else first_log_probs,
            fields["advantages"],
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            ref_log_probs=fields.get("ref_log_probs"),
            kl_log_probs=scores[reference_score(algorithm)],
            kl_coef=algorithm.kl_coef,
            entropy=scores.entropy,
            entropy_coef=algorithm.entropy_coef,
        )
        trainer_log_probs = (
            first_log_probs if algorithm.old_log_probs == "recompute" else scores.log_probs.detach()
        )
        shown = {
            "ratio": loss.ratio,
            "clip_fraction": loss.clipped,
            "entropy": scores["entropy"].detach(),
            "log_prob_gap": (trainer_log_probs - rollout_log_probs).abs(),
        }
        if algorithm.full_scores:
            shown["full_entropy"] = scores["full_entropy"].detach()
        if loss.kl is not None:
            shown["kl"] = fields["kl"] = loss.kl
        return loss.loss, shown

    return _step_objective(
        token_losses,
        algorithm.loss_aggregation,
        num_microbatches=num_microbatches,
        step_units=step_units,
        topology=topology,
    )


def sft_objective(
    aggregation: Aggregation, *, num_microbatches: int, trained_tokens: int, topology: Topology
) -> LossFunction:
    """Make the loss function of one step of the warm start: -log p(token).

    Args:
        aggregation: from `sft.sft_aggregation`.
        num_microbatches: micro-batches of the step on each rank.
        trained_tokens: trained tokens of the step, over all ranks.
        topology: this rank's place.

    Returns:
        The loss function.
    """
    return _step_objective(
        lambda _, scores: (-scores.log_probs, {}),
        aggregation,
        num_microbatches=num_microbatches,
        step_units=trained_tokens,
        topology=topology,
    )
