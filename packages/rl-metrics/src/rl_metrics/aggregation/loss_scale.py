"""The one factor that makes Megatron-Core's gradient the gradient of the step's loss.

Invariant, tested numerically here and with a real `GPTModel` in rl-runtime: with this factor the
gradient after `finalize_model_grads` is the gradient of `(1 / U) sum_i (sum_t m x) / D_i` for every
data-parallel, context-parallel, tensor and pipeline width and every split into micro-batches.
"""

from __future__ import annotations

from rl_metrics.aggregation.aggregation import Aggregation, check_aggregation, check_step_units
from rl_metrics.arguments import count

__all__ = ["calculates_per_token_loss", "megatron_loss_scale"]


def calculates_per_token_loss(aggregation: Aggregation) -> bool:
    """Return the value Megatron's `calculate_per_token_loss` must have: True for `token_mean` only.

    Args:
        aggregation: one of the five.

    Raises:
        MetricsError: for an unknown aggregation.
    """
    check_aggregation(aggregation)
    return aggregation == "token_mean"


def megatron_loss_scale(
    aggregation: Aggregation,
    *,
    num_microbatches: int,
    step_units: float | None = None,
    dp_size: int,
    cp_size: int,
) -> float:
    """Return the factor by which to multiply a micro-batch's reducer output for Megatron.

    The loss function always returns Megatron's 3-tuple `(scale * reduced, num_tokens, metrics)`.

    Derivation. Let `s_kr` be the reducer's output for micro-batch `k` on rank `r` of the `dp * cp`
    ranks; the sum of all `s_kr` is `S = sum_i (sum_t m x) / D_i`, since samples are disjoint over
    ranks and micro-batches and their tokens are disjoint over CP ranks. The wanted gradient is
    `grad S / U`.

    - All but `token_mean` (`calculate_per_token_loss = False`, `num_tokens = 1`): Megatron divides
      each micro-batch's loss by `max(num_tokens, 1) = 1` and by `num_microbatches`; its DDP
      averages gradients over `dp * cp` ranks. With the factor `f` the result is
      `f / (num_microbatches * dp * cp) * grad S`, hence `f = num_microbatches * dp * cp / U`.
    - `token_mean` (`calculate_per_token_loss = True`, `num_tokens` = ones of the micro-batch's FULL
      masks): no division per micro-batch, DDP sums, and `finalize_model_grads` divides by the sum
      of `num_tokens` over all ranks. The CP ranks of one sample each report its full count, so that
      sum is `cp` times the number `T` of trained tokens: `f / (cp * T) * grad S`, hence `f = cp`.

    Args:
        aggregation: one of the five.
        num_microbatches: micro-batches each rank runs in this step, as told to Megatron (fillers
            included).
        step_units: `U` of the whole step over all ranks: samples, rollouts, prompt groups, or the
            constant. Not used by `token_mean`.
        dp_size: data-parallel ranks, without context parallelism.
        cp_size: context-parallel ranks.

    Returns:
        The factor, a Python float.

    Raises:
        MetricsError: for an unknown aggregation, a size that is no integer of at least 1, or units
            that are not a positive number.

    Example:
        4 micro-batches per rank, 8 rollouts in the step, dp 2, cp 2: `rollout_mean` gives 4 * 2 * 2
        / 8 = 2.0, `token_mean` gives 2.0.
    """
    check_aggregation(aggregation)
    sizes = (("num_microbatches", num_microbatches), ("dp_size", dp_size), ("cp_size", cp_size))
    num_microbatches, dp_size, cp_size = (count(value, name) for name, value in sizes)
    if aggregation == "token_mean":
        return float(cp_size)
    return num_microbatches * dp_size * cp_size / check_step_units(aggregation, step_units)
