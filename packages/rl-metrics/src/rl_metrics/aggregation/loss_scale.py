"""The one factor that makes a trainer's gradient the gradient of the step's loss.

Every trainer divides on its way, by micro-batches, by ranks, by tokens; the factor undoes just
that. There is one function for each way of dividing: Megatron-Core, DDP, FSDP, the Hugging Face
Trainer.

Invariant, tested numerically, in real DDP, FSDP2 and `Trainer.training_step` over gloo ranks, and
with a real Megatron-Core `GPTModel` in rl-runtime: with this factor the gradient that reaches the
optimizer is that of `(1 / U) sum_i (sum_t m x) / D_i`, for every width, every split into
micro-batches, and ranks whose samples or micro-batches differ in number.
"""

from __future__ import annotations

import math
from typing import Literal, SupportsFloat, get_args

from rl_metrics.aggregation.aggregation import Aggregation, check_aggregation, check_step_units
from rl_metrics.arguments import count, finite_number, number
from rl_metrics.errors import MetricsError

__all__ = [
    "TrainerHook",
    "calculates_per_token_loss",
    "ddp_loss_scale",
    "fsdp_loss_scale",
    "hf_trainer_loss_scale",
    "megatron_loss_scale",
]

TrainerHook = Literal["compute_loss", "compute_loss_func"]
"""Where a loss enters the Hugging Face Trainer: an overridden method, or a function given to it."""


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
            that are not a positive number or make the factor infinite or 0.

    Example:
        4 micro-batches per rank, 8 rollouts in the step, dp 2, cp 2: `rollout_mean` gives 4 * 2 * 2
        / 8 = 2.0, `token_mean` gives 2.0.
    """
    check_aggregation(aggregation)
    sizes = (("num_microbatches", num_microbatches), ("dp_size", dp_size), ("cp_size", cp_size))
    num_microbatches, dp_size, cp_size = (count(value, name) for name, value in sizes)
    if aggregation == "token_mean":
        return float(cp_size)
    return _usable(num_microbatches * dp_size * cp_size / check_step_units(aggregation, step_units))


def ddp_loss_scale(
    aggregation: Aggregation,
    *,
    step_units: SupportsFloat,
    dp_size: int,
    cp_size: int = 1,
    accumulation_steps: int = 1,
) -> float:
    """Return the factor for a loop that averages gradients over ranks, as torch's DDP does.

    The loop calls `(scale * reduced).backward()` for each micro-batch, under `no_sync()` for all
    but the last, and steps after the last.

    Derivation. With `s_kr` and `S` as in `megatron_loss_scale`, `backward` adds `f * grad s_kr` up
    over a rank's micro-batches; a loop that divides every loss by `accumulation_steps` (Accelerate
    does) gets that share of it. DDP then averages over the `dp * cp` ranks of its group: `f /
    (accumulation_steps * dp * cp) * grad S` arrives. The wanted gradient is `grad S / U`, hence
    `f = dp * cp * accumulation_steps / U`, for every aggregation. Ranks may run different numbers
    of micro-batches, since nothing is divided by a rank's own number.

    Args:
        aggregation: one of the five.
        step_units: `U` of the whole step over all ranks, from `rl_metrics.count_step_units`:
            trained tokens, samples, rollouts, prompt groups, or the constant. 0 trained tokens
            count as 1, so that the loss of a fully masked step is 0.
        dp_size: data-parallel ranks, without context parallelism.
        cp_size: context-parallel ranks, where gradients are averaged over them too.
        accumulation_steps: what the loop divides every micro-batch's loss by, the same on all
            ranks; 1 where the gradients of micro-batches simply add up.

    Returns:
        The factor, a Python float.

    Raises:
        MetricsError: for an unknown aggregation, a size that is no integer of at least 1, or units
            that are not a positive number or make the factor infinite or 0.

    Example:
        10 trained tokens whose values add up to 17, on dp 2: `token_mean` gives 2 / 10 = 0.2; the
        mean over ranks of `0.2 * s_r` is 1.7.
    """
    sizes = (("accumulation_steps", accumulation_steps), ("dp_size", dp_size), ("cp_size", cp_size))
    accumulation_steps, dp_size, cp_size = (count(value, name) for name, value in sizes)
    return _usable(
        accumulation_steps * dp_size * cp_size / _positive_units(aggregation, step_units)
    )


def fsdp_loss_scale(
    aggregation: Aggregation,
    *,
    step_units: SupportsFloat,
    dp_size: int,
    cp_size: int = 1,
    accumulation_steps: int = 1,
    gradient_divide_factor: float | None = None,
) -> float:
    """Return the factor for torch's FSDP: fully sharded, hybrid sharded, FSDP1 and `fully_shard`.

    Derivation. As in `ddp_loss_scale`, with another divisor of the reduction. By default FSDP
    averages over all ranks that hold different data, those of its shard group and those of its
    replicate group, `dp * cp` together. After `set_gradient_divide_factor(d)` it sums over them and
    divides by `d`. Of `f * grad S` there arrives `f / (accumulation_steps * d) * grad S`, hence
    `f = d * accumulation_steps / U` with `d = dp * cp` unless it was set.

    Args:
        aggregation: one of the five.
        step_units: as in `ddp_loss_scale`.
        dp_size: data-parallel ranks, sharded and replicated, without context parallelism.
        cp_size: context-parallel ranks, where they belong to the mesh that is sharded.
        accumulation_steps: as in `ddp_loss_scale`.
        gradient_divide_factor: what was given to `set_gradient_divide_factor`; None: never called.

    Returns:
        The factor, a Python float.

    Raises:
        MetricsError: as in `ddp_loss_scale`, and for a divide factor that is no positive number.

    Example:
        8 rollouts on dp 4: `rollout_mean` gives 4 / 8 = 0.5, with a divide factor of 1 it gives 1 /
        8.
    """
    scale = ddp_loss_scale(
        aggregation,
        step_units=step_units,
        dp_size=dp_size,
        cp_size=cp_size,
        accumulation_steps=accumulation_steps,
    )
    if gradient_divide_factor is None:
        return scale
    divisor = finite_number(gradient_divide_factor, "gradient_divide_factor", above=0.0)
    return _usable(divisor * accumulation_steps / _positive_units(aggregation, step_units))


def hf_trainer_loss_scale(
    aggregation: Aggregation,
    *,
    step_units: SupportsFloat,
    dp_size: int,
    cp_size: int = 1,
    accumulation_steps: int,
    hook: TrainerHook = "compute_loss",
) -> float:
    """Return the factor for a loss inside the Hugging Face Trainer (transformers 4.46 and later).

    Derivation. Trainer leaves the mean over ranks to DDP or FSDP, which is `1 / (dp * cp)`.

    - `compute_loss`: a subclass overrides the method and sets `self.model_accepts_loss_kwargs =
      False`, as TRL does. `training_step` divides what it returns by the step's accumulation:
      `f / (accumulation_steps * dp * cp) * grad S` arrives, hence `f = dp * cp *
      accumulation_steps / U`.
    - `compute_loss_func`: the function is an argument of Trainer. `training_step` does not divide,
      and with `average_tokens_across_devices` (the default) Trainer multiplies by the `dp * cp`
      processes: `f * grad S` arrives, hence `f = 1 / U`. Without that setting Trainer multiplies
      by nothing: use `ddp_loss_scale`.

    Args:
        aggregation: one of the five.
        step_units: as in `ddp_loss_scale`.
        dp_size: data-parallel processes, without context parallelism.
        cp_size: context-parallel processes.
        accumulation_steps: micro-batches of THIS step, the trainer's
            `current_gradient_accumulation_steps` (the last step of an epoch may have fewer). Does
            not enter with `compute_loss_func`.
        hook: where the loss enters.

    Returns:
        The factor, a Python float.

    Raises:
        MetricsError: as in `ddp_loss_scale`, and for an unknown hook.

    Example:
        8 rollouts, 2 processes, 4 micro-batches each: `compute_loss` gives 2 * 4 / 8 = 1.0,
        `compute_loss_func` 1 / 8.
    """
    given: object = hook
    if not isinstance(given, str) or given not in get_args(TrainerHook):
        raise MetricsError(f"hook is {hook!r}; use one of {', '.join(get_args(TrainerHook))}")
    scale = ddp_loss_scale(
        aggregation,
        step_units=step_units,
        dp_size=dp_size,
        cp_size=cp_size,
        accumulation_steps=accumulation_steps,
    )
    if hook == "compute_loss":
        return scale
    return _usable(1.0 / _positive_units(aggregation, step_units))


def _usable(scale: float) -> float:
    """Return a factor; refuse one that float64 rounds to infinity or to 0."""
    if not 0.0 < scale < math.inf:
        raise MetricsError(
            f"the factor of the loss is {scale:g}, beyond float64; check step_units, the number of"
            " units of the whole step, and the sizes"
        )
    return scale


def _positive_units(aggregation: Aggregation, step_units: SupportsFloat) -> float:
    """Return the units of a step, 0 trained tokens as 1."""
    check_aggregation(aggregation)
    given: object = step_units
    units = math.nan if given is None else number(step_units, "step_units")
    # A step whose tokens are all masked has loss 0, whatever it is divided by.
    return (
        1.0 if aggregation == "token_mean" and not units else check_step_units(aggregation, units)
    )
