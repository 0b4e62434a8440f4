"""The slow, obvious form of every reduction, in float64: what the tensor code is tested against.

`rl_metrics.torch` offers the same names for tensors.

Invariants, tested: the sum over CP ranks of `get_sum_of_sample_mean` equals the value of one rank
that holds everything; a value at a masked position never enters, be it NaN or infinite; a step
whose tokens are all masked has loss 0 and no mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_metrics.aggregation.aggregation import Aggregation, check_aggregation
from rl_metrics.aggregation.denominators import (
    checked_denominators,
    count_step_units,
    loss_denominators,
    mask_sums,
)
from rl_metrics.aggregation.ids import Ids
from rl_metrics.aggregation.masks import (
    check_mask_lengths,
    concatenated_masks,
    is_trained,
    listed_masks,
    sums_of_pieces,
)
from rl_metrics.arguments import IntArray, as_array, flag, listed, number_array
from rl_metrics.errors import MetricsError
from rl_metrics.geometry.context_parallel import ContextParallel, int_array
from rl_metrics.geometry.packing import packed_responses

__all__ = [
    "aggregate",
    "aggregate_diagnostic",
    "get_sum_of_sample_mean",
    "loss_reducer",
    "reducer_denominators",
]

Reducer = Callable[[npt.ArrayLike], np.float64]
"""Takes the local response values of a micro-batch, returns their masked, divided sum."""


def get_sum_of_sample_mean(
    total_lengths: Sequence[int] | IntArray,
    response_lengths: Sequence[int] | IntArray,
    loss_masks: Sequence[Any],
    sample_denoms: Sequence[float] | npt.NDArray[Any] | None = None,
    calculate_per_token_loss: bool = False,
    *,
    cp: ContextParallel | None = None,
    stream_offsets: Sequence[int] | IntArray | None = None,
    stream_length: int | None = None,
    pad_multiple: int | None = None,
) -> Reducer:
    """Return the reference reducer of one micro-batch: `x -> sum_i (sum_t m_it x_it) / D_i`.

    Arguments, result and errors are those of `rl_metrics.torch.get_sum_of_sample_mean`, on arrays
    and in float64.

    Example:
        Responses of 2 and 1 tokens, all trained: `[1, 3, 5]` gives (1 + 3) / 2 + 5 / 1 = 7.
    """
    owned = packed_responses(
        total_lengths,
        response_lengths,
        ContextParallel() if cp is None else cp,
        pad_multiple=pad_multiple,
        stream_length=stream_length,
        stream_offsets=stream_offsets,
    )
    flat, lengths = concatenated_masks(listed_masks(loss_masks))
    check_mask_lengths(lengths, int_array(response_lengths))
    if flag(calculate_per_token_loss, "calculate_per_token_loss"):
        divisors = np.ones(lengths.size)
    else:
        own = sums_of_pieces(flat, lengths)
        divisors = checked_denominators(own if sample_denoms is None else sample_denoms, own.size)
    trained = flat[owned.flat_indices]

    def reduce(x: npt.ArrayLike) -> np.float64:
        values = number_array(x, "the values")
        if values.shape != trained.shape:
            raise MetricsError(
                f"got values of shape {values.shape}; this rank owns {trained.size}"
                " response tokens of the micro-batch"
            )
        total = 0.0
        for i, divisor in enumerate(divisors.tolist()):
            total += float(np.sum(values[trained & (owned.samples == i)])) / divisor
        return np.float64(total)

    return reduce


def reducer_denominators(aggregation: Aggregation, denominators: Any) -> tuple[Any, bool]:
    """Return what makes the low-level reducer compute `aggregation`.

    Args:
        aggregation: one of the five.
        denominators: [N] of the whole step, or None.

    Returns:
        Its arguments `(sample_denoms, calculate_per_token_loss)`.

    Raises:
        MetricsError: when `rollout_mean` or `prompt_mean` come without denominators, or
            `token_mean` or `constant` with some: a micro-batch cannot know its siblings' tokens,
            and nothing is divided per sample in the latter two.
    """
    check_aggregation(aggregation)
    if aggregation in ("rollout_mean", "prompt_mean") and denominators is None:
        raise MetricsError(
            f"{aggregation} needs denominators computed over the whole step: call"
            f" loss_denominators({aggregation!r}, ...) before packing"
        )
    if aggregation in ("token_mean", "constant"):
        if denominators is not None and not np.all(number_array(denominators, "denominators") == 1):
            raise MetricsError(
                f"{aggregation} divides once per step, not per sample, but got denominators other"
                " than 1; leave them out"
            )
        return None, True
    return denominators, False


def loss_reducer(
    aggregation: Aggregation,
    total_lengths: Sequence[int] | IntArray,
    response_lengths: Sequence[int] | IntArray,
    loss_masks: Sequence[Any],
    *,
    denominators: Sequence[float] | npt.NDArray[Any] | None = None,
    cp: ContextParallel | None = None,
    stream_offsets: Sequence[int] | IntArray | None = None,
    stream_length: int | None = None,
    pad_multiple: int | None = None,
) -> Reducer:
    """Return the reference reducer of one micro-batch for an aggregation.

    Arguments, result and errors are those of `rl_metrics.torch.loss_reducer`, on arrays and in
    float64.
    """
    sample_denoms, per_token = reducer_denominators(aggregation, denominators)
    return get_sum_of_sample_mean(
        total_lengths,
        response_lengths,
        loss_masks,
        sample_denoms,
        per_token,
        cp=cp,
        stream_offsets=stream_offsets,
        stream_length=stream_length,
        pad_multiple=pad_multiple,
    )


def aggregate(
    aggregation: Aggregation,
    values: Sequence[npt.ArrayLike],
    loss_masks: Sequence[Any],
    *,
    rollout_ids: Ids | None = None,
    group_ids: Ids | None = None,
    constant: float | None = None,
) -> float | None:
    """Return the value of a whole step held in one place: the number every layout must report.

    Args:
        aggregation: one of the five.
        values: N arrays [R_i], a value per response token.
        loss_masks: N masks [R_i].
        rollout_ids: [N], integers or strings, for `rollout_mean`.
        group_ids: [N], integers or strings, for `prompt_mean`.
        constant: the divisor of `constant`.

    Returns:
        The value in float64, or None ("no data") when no token of the step is trained.

    Raises:
        MetricsError: when lengths disagree, a mask holds something else than booleans or 0 and 1,
            or an argument is missing.

    Example:
        Two samples of 100 tokens at 0.5 and 900 at 0.3: `token_mean` 0.32, `sample_mean` 0.4.
    """
    loss_masks = _rows(loss_masks)
    ids = {"rollout_ids": rollout_ids, "group_ids": group_ids}
    divisors = loss_denominators(aggregation, loss_masks, **ids)
    units = count_step_units(aggregation, loss_masks, **ids, constant=constant)
    total = _divided_sum(values, loss_masks, divisors)
    return total / units if mask_sums(loss_masks).any() else None


def aggregate_diagnostic(
    aggregation: Aggregation,
    values: Sequence[npt.ArrayLike],
    loss_masks: Sequence[Any],
    *,
    rollout_ids: Ids | None = None,
    group_ids: Ids | None = None,
) -> float | None:
    """Return the mean of a diagnostic over a whole step: units without trained tokens do not count.

    A loss keeps the divisor of all units, so that a masked rollout does not change the weights of
    the others; an entropy is a mean over what there is: `sum_i (sum_t m x) / D_i` divided by the
    same sum for `x = 1`, which counts the units that have a trained token.

    Args:
        aggregation: one of the five; `constant` averages over trained tokens, as `token_mean`.
        values: as in `aggregate`, like the rest.
        loss_masks: as there.
        rollout_ids: as there.
        group_ids: as there.

    Returns:
        The value in float64, or None ("no data") when no token of the step is trained.

    Raises:
        MetricsError: as in `aggregate`.

    Example:
        Two rollouts, one fully masked, 2.0 on every trained token: 2.0, where `aggregate` gives 1.0
        for `rollout_mean`.
    """
    loss_masks = _rows(loss_masks)
    ids = {"rollout_ids": rollout_ids, "group_ids": group_ids}
    divisors = loss_denominators(aggregation, loss_masks, **ids)
    total = _divided_sum(values, loss_masks, divisors)
    units = float(np.sum(mask_sums(loss_masks) / divisors))
    return total / units if units else None


def _rows(loss_masks: Sequence[Any]) -> list[Any]:
    """Return one mask per sample, those of a padded array row by row."""
    if getattr(loss_masks, "ndim", 1) == 2:
        return list(as_array(loss_masks, "loss_masks"))
    return listed_masks(loss_masks)


def _divided_sum(values: Any, loss_masks: Sequence[Any], divisors: npt.NDArray[Any]) -> float:
    """Return `sum_i (sum_t m_it x_it) / D_i`, sample by sample."""
    values = listed(values, "values, one array per sample")
    if len(values) != len(loss_masks):
        raise MetricsError(
            f"values of {len(values)} samples but {len(loss_masks)} loss masks; give one of each"
            " per sample"
        )
    total = 0.0
    for i, (value, mask) in enumerate(zip(values, loss_masks, strict=True)):
        array = number_array(value, f"sample {i}: the values")
        trained = is_trained(mask, f"sample {i}: the mask")
        if array.shape != trained.shape:
            raise MetricsError(
                f"sample {i}: values of shape {array.shape} but a mask of shape {trained.shape}"
            )
        total += float(np.sum(array[trained])) / float(divisors[i])
    return total
