"""What a step's samples are divided by, where each rank knows its own samples only.

In a loop whose ranks load their own data nobody holds the whole step. Its denominators, units and
rollout shares need it: siblings of a rollout may lie on any rank. One collective brings every
rank the trained tokens and ids of all samples.

Invariants, tested with real gloo: every rank gets what one process that holds the step would
compute for its samples; a rank whose masks or ids are wrong makes EVERY rank raise an error that
names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from rl_metrics.aggregation.aggregation import Aggregation, check_aggregation
from rl_metrics.aggregation.denominators import divisors_of, mask_sums, units_of
from rl_metrics.aggregation.ids import Ids, id_entries
from rl_metrics.arguments import FloatArray
from rl_metrics.errors import KeyAgreementError
from rl_metrics.metric.agreement import RankReport, disagreement
from rl_metrics.metric.rollout_scalars import rollout_shares
from rl_metrics.torch.groups import group_rank, group_size, is_alone
from rl_metrics.torch.masks import Masks

__all__ = ["StepDivisors", "step_divisors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDivisors:
    """What this rank's samples and the whole step are divided by.

    `StepDivisors(denominators=array([4., 4.]), step_units=2.0, rollout_shares=array([.5, .5]))`.
    """

    denominators: FloatArray
    """float64 [n]: `D_i` of each of this rank's samples, at least 1."""

    step_units: float
    """`U` of the whole step, the same on all ranks."""

    rollout_shares: FloatArray | None
    """float64 [n]: one over the siblings of each of this rank's samples in the whole step, for
    `rl_metrics.rollout_metric`; None without `rollout_ids`."""


def step_divisors(
    aggregation: Aggregation,
    loss_masks: Masks,
    *,
    rollout_ids: Ids | None = None,
    group_ids: Ids | None = None,
    constant: float | None = None,
    group: dist.ProcessGroup | None,
) -> StepDivisors:
    """Return denominators, units and rollout shares of a step whose samples lie on many ranks.

    Called once per step by every rank of `group`, with all of the rank's samples of the step, of
    all its micro-batches; none is fine. One collective, of a few bytes per sample.

    Args:
        aggregation: one of the five, the same on all ranks.
        loss_masks: n FULL masks [R_i], or one array or tensor [n, T], 0 at padding. Masks on a
            device are copied to the host.
        rollout_ids: [n], integers or strings that mean the same on every rank; needed for
            `rollout_mean` and for rollout shares.
        group_ids: [n], alike, needed for `prompt_mean`.
        constant: the divisor of `constant`, the same on all ranks.
        group: the data-parallel group: ranks that hold different samples. Context-parallel ranks of
            one sample do not belong into it together.

    Returns:
        What belongs to this rank's samples, in their order.

    Raises:
        KeyAgreementError: on every rank the same, when aggregation or constant differ, or some rank
            gives ids and another none.
        MetricsError: for this rank's masks or ids, as in `rl_metrics.loss_denominators`; the other
            ranks raise `KeyAgreementError` naming this one.

    Example:
        Masks of 3 and 1 ones of rollout "a" on rank 0, of 2 ones of "a" and 1 of "b" on rank 1,
        `rollout_mean`: denominators [6, 6] and [6, 1], 2 units, shares [1/3, 1/3] and [1/3, 1].
    """
    failure: Exception | None = None
    settings: dict[str, str] = {}
    columns: dict[str, list[Any]] = {}
    try:
        check_aggregation(aggregation)
        sums = mask_sums(cast("Any", loss_masks))
        columns["sums"] = sums.tolist()
        given = {"rollout_ids": rollout_ids, "group_ids": group_ids}
        for name, ids in given.items():
            settings[name] = "missing" if ids is None else "given"
            columns[name] = [] if ids is None else list(id_entries(ids, sums.size, name))
        settings |= {"aggregation": aggregation, "constant": repr(constant)}
        # On this rank's samples, for its errors: those of the whole step need the whole step.
        divisors_of(aggregation, sums, rollout_ids=rollout_ids, group_ids=group_ids)
        if aggregation == "constant":
            units_of(aggregation, sums, **given, constant=constant)
    except Exception as error:
        # Whatever it is: the others wait for this rank in the collective, and must hear of it.
        failure = error
    told = None if failure is None else str(failure) or type(failure).__name__
    mine = RankReport(failure=told, settings=settings, metrics=()), columns
    everyone: list[Any] = [mine]
    if not is_alone(group):
        everyone *= group_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    reports = [report for report, _ in everyone]
    if failure is not None:
        raise failure
    if any(report.failure is not None or report.settings != settings for report in reports):
        raise KeyAgreementError(disagreement(reports))
    return _divided(aggregation, [part for _, part in everyone], settings, constant, group)


def _divided(
    aggregation: Aggregation,
    parts: Sequence[dict[str, list[Any]]],
    settings: dict[str, str],
    constant: float | None,
    group: dist.ProcessGroup | None,
) -> StepDivisors:
    """Compute everything for the whole step and return this rank's part of it."""
    ends = np.cumsum([len(part["sums"]) for part in parts])
    rank = group_rank(group)
    own = slice(ends[rank] - len(parts[rank]["sums"]), ends[rank])
    whole: dict[str, Any] = {
        name: [entry for part in parts for entry in part[name]] for name in parts[0]
    }
    sums = np.array(whole.pop("sums"), np.float64)
    ids = {name: column if settings[name] == "given" else None for name, column in whole.items()}
    shares = None if ids["rollout_ids"] is None else rollout_shares(ids["rollout_ids"])[own]
    return StepDivisors(
        denominators=divisors_of(aggregation, sums, **ids)[own],
        step_units=units_of(aggregation, sums, **ids, constant=constant),
        rollout_shares=shares,
    )
