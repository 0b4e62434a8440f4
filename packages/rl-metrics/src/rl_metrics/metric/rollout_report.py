"""What the rollout log reports about response-aligned values, on the trainer's side.

Every value is masked, reduced like the loss, and counted once whatever the CP width: each CP rank
contributes its disjoint part to the numerator and an equal share of the weight, so no factor `cp`
appears anywhere. A diagnostic carries its own weight, that of the units with trained tokens.
Invariant, tested: with one step per batch the rollout report equals the train step's.
"""

from __future__ import annotations

from typing import SupportsFloat

from rl_metrics.aggregation.aggregation import Aggregation, check_aggregation, check_step_units
from rl_metrics.arguments import count, finite_number, number
from rl_metrics.errors import MetricsError
from rl_metrics.metric.metric import Metric

__all__ = ["rollout_log_diagnostic", "rollout_log_metric_contribution"]

_UNITS: dict[Aggregation, str] = {
    "token_mean": "token",
    "sample_mean": "sample",
    "rollout_mean": "rollout",
    "prompt_mean": "prompt",
    "constant": "",
}


def rollout_log_metric_contribution(
    name: str,
    reducer_sum: SupportsFloat,
    *,
    aggregation: Aggregation,
    step_tokens: SupportsFloat,
    step_units: SupportsFloat | None = None,
    group_size: int,
) -> Metric:
    """Return this rank's contribution to one rollout metric, a record of kind `mean`.

    Args:
        name: name in the log.
        reducer_sum: output of the loss reducer over all of this rank's samples of the batch (its CP
            part of them), detached: a number or a 0-dim tensor.
        aggregation: one of the five, the same on all ranks.
        step_tokens: trained tokens of the whole batch, all ranks, each counted once. 0 makes the
            metric "no data".
        step_units: `U` of the whole batch, the same on all ranks; not used by `token_mean`. A
            record carries a share of it only, so ranks that disagree on it are not found out.
        group_size: ranks that contribute, `dp * cp`.

    Returns:
        A record with numerator `reducer_sum` and weight `U / group_size`; the weights of all ranks
        add up to `U`.

    Raises:
        MetricsError: for an unknown aggregation, missing units, a `group_size` that is no count,
            tokens that are no finite number of at least 0, or a sum other than 0 where no token is
            trained.

    Example:
        `rollout_mean` of 8 rollouts on 4 ranks whose sums are 4, 0, 10 and 2: each weighs 2, and
        the log shows 16 / 8 = 2.0.
    """
    check_aggregation(aggregation)
    group_size = count(group_size, f"metric {name!r}: group_size")
    tokens = finite_number(step_tokens, f"metric {name!r}: step_tokens", at_least=0.0)
    units = tokens if aggregation == "token_mean" else check_step_units(aggregation, step_units)
    total = number(reducer_sum, f"metric {name!r}: reducer_sum")
    if tokens:
        return Metric.of_mean(name, total, units / group_size, unit=_UNITS[aggregation])
    if total:
        raise MetricsError(
            f"metric {name!r}: reducer_sum is {total} with step_tokens 0; without trained tokens"
            " every reducer output is 0"
        )
    return Metric.empty(name, "mean", unit=_UNITS[aggregation])


def rollout_log_diagnostic(
    name: str, numerator: SupportsFloat, weight: SupportsFloat, *, aggregation: Aggregation
) -> Metric:
    """Return this rank's contribution to a rollout metric that is watched and not minimised.

    Its mean is over the units that have a trained token, as in `MicroBatchMetrics.diagnostics`:
    `rollout_log_metric_contribution` divides by all units, like the loss.

    Args:
        name: name in the log.
        numerator: output of the loss reducer over all of this rank's samples of the batch (its CP
            part of them), detached: a number or a 0-dim tensor.
        weight: what they weigh; `LossReducer.diagnostic` gives both.
        aggregation: one of the five, the same on all ranks.

    Returns:
        A record of kind `mean`; "no data" where the weight is 0.

    Raises:
        MetricsError: for an unknown aggregation, a weight that is negative or not finite, or a
            numerator under weight 0.

    Example:
        Entropy 2.0 on every trained token, half of the rollouts fully masked: 2.0, where
        `rollout_log_metric_contribution` gives 1.0.
    """
    check_aggregation(aggregation)
    # A constant divides a loss; what is watched is then a mean over tokens.
    unit = _UNITS[aggregation] or _UNITS["token_mean"]
    return Metric.of_mean(name, numerator, weight, unit=unit)
