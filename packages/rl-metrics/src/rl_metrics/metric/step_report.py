"""What a training step reports, from the pieces its micro-batches leave behind.

A micro-batch's metric is a reducer output: a plain sum over its trained tokens, divided by
denominators of the whole step. So the step's value is their sum over micro-batches and ranks
divided by the step's units, whatever the split. Invariant, tested: the report is the same for every
(dp, cp), both layouts and any micro-batch split, and equals that of one process, which
`rl_metrics.aggregation.loss_reduction.aggregate` computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import SupportsFloat

from rl_metrics.aggregation.aggregation import Aggregation, check_aggregation, check_step_units
from rl_metrics.arguments import count, finite_number, number
from rl_metrics.errors import KeyAgreementError, MetricsError
from rl_metrics.metric.agreement import difference
from rl_metrics.metric.metric import Metric
from rl_metrics.metric.reporting import listed_metrics, merge_metrics, report

__all__ = ["MicroBatchMetrics", "finish_step_report", "step_contributions", "step_settings"]

TRAINED_TOKENS = "(trained tokens of the step)"
"""Internal name of the token count that travels with the sums; a user's metric may not take it."""

_REDUCER_OUTPUT = "reducer output"
"""Unit of the sums on their way: one never merges with another rank's metric of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchMetrics:
    """What one micro-batch reports on one rank.

    Serves as the third element of Megatron's loss function result.

    Fields: `sums`, name -> output of the loss reducer, UNSCALED; `num_tokens`, trained tokens by
    the FULL masks, whatever the aggregation (`megatron_num_tokens`, which is 1 for most of them, is
    another number); `metrics`, further records with a kind of their own.

    A filler micro-batch reports the same names with 0 and `num_tokens=0`: ranks must agree on
    names.
    """

    sums: Mapping[str, SupportsFloat]
    """name -> output of the loss reducer on this rank, UNSCALED, detached: a Python float or a
    0-dim tensor on any device.

    Hand over a tensor that shares no memory with the loss: Megatron divides the loss in place.
    """

    num_tokens: SupportsFloat
    """Trained tokens by the FULL masks of the micro-batch, a whole number.

    Every CP rank gives the same. 0 says "no data": all sums are 0 then.
    """

    metrics: Sequence[Metric] = field(default=())
    """Metrics with a kind of their own, such as a sample count. Kept as a tuple."""

    def __post_init__(self) -> None:
        """Refuse sums that are no mapping and metrics that are no records, naming the field.

        What they hold is looked at when a step is reduced.
        """
        if not isinstance(self.sums, Mapping):
            raise MetricsError(
                f"MicroBatchMetrics: sums is {type(self.sums).__name__}; give a mapping, {{name:"
                " reducer output}"
            )
        object.__setattr__(
            self, "metrics", tuple(listed_metrics(self.metrics, "MicroBatchMetrics: metrics"))
        )


def step_contributions(
    sums: Sequence[Mapping[str, float]],
    num_tokens: Sequence[float],
    extra: Sequence[Sequence[Metric]],
) -> list[Metric]:
    """Merge one rank's micro-batches into records that travel.

    Args:
        sums: per micro-batch, name -> reducer output.
        num_tokens: per micro-batch, trained tokens by the full masks.
        extra: per micro-batch, further metrics.

    Returns:
        One `sum` record per name, one for the tokens, and the merged further metrics.

    Raises:
        KeyAgreementError: when a micro-batch reports other names than the first.
        MetricsError: when a token count is no whole number of at least 0, a micro-batch without
            tokens has sums, or further metrics cannot merge or reuse a name.
    """
    names = list(sums[0]) if sums else []
    for k, (values, tokens) in enumerate(zip(sums, num_tokens, strict=True)):
        told = difference(names, values)
        if told:
            raise KeyAgreementError(
                f"micro-batch {k} reports other metrics than micro-batch 0: it {told}; report the"
                " same names from every micro-batch, fillers included"
            )
        if not (finite_number(tokens, f"micro-batch {k}: num_tokens", at_least=0.0)).is_integer():
            raise MetricsError(
                f"micro-batch {k}: num_tokens is {tokens}; it counts the trained tokens of the full"
                " masks"
            )
        wrong = [name for name in names if not tokens and number(values[name], name)]
        if wrong:
            raise MetricsError(
                f"micro-batch {k}: {wrong[0]!r} is {values[wrong[0]]} with num_tokens 0;"
                " without trained tokens every reducer output is 0, so count the tokens of the"
                " full masks"
            )
    further = merge_metrics([metric for metrics in extra for metric in metrics])
    times = Counter([*names, TRAINED_TOKENS, *further])
    clash = sorted(name for name in times if times[name] > 1)
    if clash:
        raise MetricsError(
            f"metric name {clash[0]!r} is used twice in one step; rename one of them"
        )
    return [
        *(
            Metric.of_sum(name, sum(float(values[name]) for values in sums), unit=_REDUCER_OUTPUT)
            for name in names
        ),
        Metric.of_sum(TRAINED_TOKENS, float(sum(num_tokens)), unit="token"),
        *further.values(),
    ]


def step_settings(
    aggregation: Aggregation, step_units: SupportsFloat | None, cp_size: int
) -> dict[str, str]:
    """Return what all ranks of a step must pass alike, checked, as text to compare.

    Args:
        aggregation: one of the five.
        step_units: `U` of the whole step; not used by `token_mean`, so it does not enter there.
        cp_size: context-parallel ranks.

    Returns:
        name -> value. `step_settings("rollout_mean", 8, 2)` is `{"aggregation": "rollout_mean",
        "cp_size": "2", "step_units": "8.0"}`.

    Raises:
        MetricsError: for an unknown aggregation, units that are not a positive number, or a
            `cp_size` that is no count.
    """
    check_aggregation(aggregation)
    settings = {"aggregation": str(aggregation), "cp_size": str(count(cp_size, "cp_size"))}
    if aggregation != "token_mean":
        settings["step_units"] = repr(check_step_units(aggregation, step_units))
    return settings


def finish_step_report(
    reduced: Mapping[str, Metric],
    names: Collection[str],
    *,
    aggregation: Aggregation,
    step_units: float | None,
    cp_size: int,
) -> dict[str, float | None]:
    """Turn the reduced records of a step into its report.

    Args:
        reduced: the records of `step_contributions`, merged over the `dp * cp` ranks.
        names: which of them are reducer outputs; the others report by their own kind.
        aggregation: one of the five.
        step_units: `U` of the whole step; not used by `token_mean`, whose unit is counted here.
        cp_size: context-parallel ranks, each of which counted every token of its samples.

    Returns:
        name -> value; None when no token of the step was trained.

    Raises:
        MetricsError: for an unknown aggregation, missing units, or two metrics that report under
            one name, such as a reducer output `x_mean` beside moments of `x`.

    Example:
        `token_mean` at `cp_size = 2`: sums 10 and 6 with 4 tokens counted on each rank give 16 / (8
        / 2) = 4.
    """
    step_settings(aggregation, step_units, cp_size)
    tokens = reduced[TRAINED_TOKENS].numerator / cp_size
    units = tokens if aggregation == "token_mean" else check_step_units(aggregation, step_units)
    lines = {
        name: metric.numerator / units if tokens else None
        for name, metric in reduced.items()
        if name in names
    }
    others = report(
        metric for name, metric in reduced.items() if name not in {*names, TRAINED_TOKENS}
    )
    clash = sorted(set(lines) & set(others))
    if clash:
        raise MetricsError(
            f"a reducer output and another metric both report under the name {clash[0]!r}; rename"
            " one of them"
        )
    return lines | others
