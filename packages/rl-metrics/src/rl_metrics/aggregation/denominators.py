"""What each sample's masked sum is divided by, and how many units a step has.

Both are computed over the WHOLE step before samples are packed into micro-batches: a micro-batch
does not know how many tokens the siblings of its samples have elsewhere.

Invariants, tested: siblings share one denominator; a denominator of 0 is given as 1, so that a
fully masked unit contributes 0 but still counts as a unit, leaving the weights of the others alone;
no token is added to any denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_metrics.aggregation.aggregation import Aggregation, check_aggregation, check_step_units
from rl_metrics.aggregation.ids import Ids, id_column
from rl_metrics.aggregation.masks import concatenated_masks, sums_of_pieces
from rl_metrics.arguments import number_array
from rl_metrics.errors import MetricsError

__all__ = [
    "checked_denominators",
    "count_step_units",
    "divisors_of",
    "loss_denominators",
    "mask_sums",
    "prompt_denominators",
    "rollout_denominators",
    "units_of",
]

_IDS: dict[Aggregation, str] = {"rollout_mean": "rollout_ids", "prompt_mean": "group_ids"}
"""The argument that says which samples belong together, where the aggregation asks."""


def mask_sums(loss_masks: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Return how many tokens of each sample are trained.

    Args:
        loss_masks: N masks [R_i] of 0 and 1: lists, numpy arrays or tensors; or all of them in one
            array or tensor [N, T], 0 at padding.

    Returns:
        float64 [N], tokens.

    Raises:
        MetricsError: when a mask is not flat, or holds something else than booleans or 0 and 1; it
            names sample and token.
    """
    return sums_of_pieces(*concatenated_masks(loss_masks))


def checked_denominators(sample_denoms: npt.ArrayLike, num_samples: int) -> npt.NDArray[np.float64]:
    """Return given denominators as float64 [N], a denominator of 0 as 1.

    Args:
        sample_denoms: [N], trained tokens or any other divisor of each sample.
        num_samples: `N`.

    Raises:
        MetricsError: for another shape, or naming the sample whose denominator is negative or not
            finite.
    """
    values = number_array(sample_denoms, "sample_denoms")
    if values.shape != (num_samples,):
        raise MetricsError(
            f"sample_denoms has shape {values.shape} for {num_samples} samples; give one per sample"
        )
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        raise MetricsError(
            f"sample {wrong[0]}: denominator {values[wrong[0]]}; give a finite number that is not"
            " negative, 0 counts as 1"
        )
    return np.where(values == 0, 1.0, values)


def rollout_denominators(loss_masks: Sequence[Any], rollout_ids: Ids) -> npt.NDArray[np.float64]:
    """Return each sample's denominator for `rollout_mean`: the trained tokens of its rollout.

    Args:
        loss_masks: N masks [R_i], the whole step (or any larger set that contains every sibling).
        rollout_ids: [N], equal for siblings: integers or strings, as in
            `rl_metrics.aggregation.ids`; order does not matter.

    Returns:
        float64 [N], 1 where the rollout has no trained token. Whole numbers, so float32 holds them
        exactly up to 2^24 tokens a rollout.

    Raises:
        MetricsError: when the lists differ in length, ids are neither integers nor strings, or as
            in `mask_sums`.

    Example:
        Masks of 3, 1 and 2 ones with `rollout_ids = [0, 0, 1]` give `[4, 4, 2]`.
    """
    return _grouped(mask_sums(loss_masks), rollout_ids, "rollout_ids")


def prompt_denominators(loss_masks: Sequence[Any], group_ids: Ids) -> npt.NDArray[np.float64]:
    """Return each sample's denominator for `prompt_mean`: the trained tokens of its prompt group.

    Args:
        loss_masks: N masks [R_i], the whole step (or any larger set that contains every prompt
            group whole).
        group_ids: [N], equal for the rollouts of one prompt: integers or strings; order does not
            matter.

    Returns:
        float64 [N], 1 where the group has no trained token.

    Raises:
        MetricsError: as in `rollout_denominators`.

    Example:
        Masks of 3, 1 and 2 ones with `group_ids = [0, 0, 0]` give `[6, 6, 6]`.
    """
    return _grouped(mask_sums(loss_masks), group_ids, "group_ids")


def loss_denominators(
    aggregation: Aggregation,
    loss_masks: Sequence[Any],
    *,
    rollout_ids: Ids | None = None,
    group_ids: Ids | None = None,
) -> npt.NDArray[np.float64]:
    """Return the denominators `D_i` of any aggregation (the table in `rl_metrics.aggregation`).

    Args:
        aggregation: one of the five.
        loss_masks: N masks [R_i] of the whole step.
        rollout_ids: [N], integers or strings, needed for `rollout_mean`.
        group_ids: [N], integers or strings, needed for `prompt_mean`.

    Returns:
        float64 [N], at least 1. All ones for `token_mean` and `constant`, whose divisor is one
        number for the step.

    Raises:
        MetricsError: for an unknown aggregation, missing ids, or as in `mask_sums` and
            `rollout_denominators`.
    """
    check_aggregation(aggregation)
    ids = {"rollout_ids": rollout_ids, "group_ids": group_ids}
    return divisors_of(aggregation, mask_sums(loss_masks), **ids)


def divisors_of(
    aggregation: Aggregation,
    sums: npt.NDArray[np.float64],
    *,
    rollout_ids: Ids | None,
    group_ids: Ids | None,
) -> npt.NDArray[np.float64]:
    """As `loss_denominators`, from the trained tokens of each sample, float64 [N]."""
    if aggregation in _IDS:
        return _grouped(sums, *_step_ids(aggregation, rollout_ids, group_ids))
    return np.maximum(sums, 1.0) if aggregation == "sample_mean" else np.ones_like(sums)


def count_step_units(
    aggregation: Aggregation,
    loss_masks: Sequence[Any],
    *,
    rollout_ids: Ids | None = None,
    group_ids: Ids | None = None,
    constant: float | None = None,
) -> float:
    """Return the step's units `U`: what the sum over all samples is divided by.

    Args:
        aggregation: one of the five.
        loss_masks: N masks [R_i] of the whole step.
        rollout_ids: [N], integers or strings, needed for `rollout_mean`.
        group_ids: [N], integers or strings, needed for `prompt_mean`.
        constant: the divisor of `constant`.

    Returns:
        Trained tokens, samples, rollouts, prompt groups or the constant. Fully masked samples,
        rollouts and groups are counted.

    Raises:
        MetricsError: for an unknown aggregation, missing ids, another number of ids than masks, a
            constant that is not positive, or as in `mask_sums`.
    """
    check_aggregation(aggregation)
    ids = {"rollout_ids": rollout_ids, "group_ids": group_ids}
    return units_of(aggregation, mask_sums(loss_masks), **ids, constant=constant)


def units_of(
    aggregation: Aggregation,
    sums: npt.NDArray[np.float64],
    *,
    rollout_ids: Ids | None,
    group_ids: Ids | None,
    constant: float | None,
) -> float:
    """As `count_step_units`, from the trained tokens of each sample, float64 [N]."""
    if aggregation in _IDS:
        ids, name = _step_ids(aggregation, rollout_ids, group_ids)
        return float(np.unique(id_column(ids, sums.size, name)).size)
    if aggregation == "constant":
        return check_step_units(aggregation, constant)
    return float(sums.sum()) if aggregation == "token_mean" else float(sums.size)


def _step_ids(
    aggregation: Aggregation, rollout_ids: Ids | None, group_ids: Ids | None
) -> tuple[Ids, str]:
    """Return the ids that an aggregation goes by, and the name of that argument."""
    name = _IDS[aggregation]
    ids = {"rollout_ids": rollout_ids, "group_ids": group_ids}[name]
    if ids is None:
        raise MetricsError(
            f"{aggregation} needs {name}, one integer or string per sample of the step"
        )
    return ids, name


def _grouped(sums: npt.NDArray[np.float64], ids: Ids, name: str) -> npt.NDArray[np.float64]:
    """Sum the trained tokens over equal ids and give every sample its group's sum, 0 as 1."""
    groups = id_column(ids, sums.size, name)
    return np.maximum(np.bincount(groups, weights=sums), 1.0)[groups]
