"""What a training step reports, from the pieces its micro-batches leave behind.

A micro-batch's metric is a reducer output: a plain sum over its trained tokens, divided by
denominators of the whole step. So the step's value is their sum over micro-batches and ranks
divided by the step's units, whatever the split; a diagnostic is divided by its own weight, that of
the units with trained tokens. Invariant, tested: the report is the same for every (dp, cp), both
layouts and any micro-batch split, and equals that of one process, which `aggregate` and
`aggregate_diagnostic` of `rl_metrics.aggregation.loss_reduction` compute.
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

__all__ = [
    "CONTRADICTIONS",
    "DIAGNOSTIC",
    "REDUCER_OUTPUT",
    "TRAINED_TOKENS",
    "MicroBatchMetrics",
    "check_step_names",
    "check_step_numbers",
    "finish_step_report",
    "step_contributions",
    "step_settings",
]

TRAINED_TOKENS = "(trained tokens of the step)"
"""Internal name of the token count that travels with the sums; a user's metric may not take it."""

CONTRADICTIONS = "(numbers of the step that contradict)"
"""Internal name of the count of micro-batches whose numbers on a device do not fit together."""

REDUCER_OUTPUT = "reducer output"
"""Unit of the sums on their way: one never merges with another rank's metric of the same name."""

DIAGNOSTIC = "diagnostic"
"""Unit of the diagnostics on their way, for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchMetrics:
    """What one micro-batch reports on one rank.

    Serves as the third element of Megatron's loss function result.

    Fields: `sums`, name -> output of the loss reducer, UNSCALED, divided by the step's units like
    the loss; `diagnostics`, name -> numerator and weight, divided by their own weight;
    `num_tokens`, trained tokens by the FULL masks, whatever the aggregation (`megatron_num_tokens`,
    which is 1 for most of them, is another number); `metrics`, further records with a kind of their
    own.

    A filler micro-batch reports the same names with 0 and `num_tokens=0`: ranks must agree on
    names.
    """

    sums: Mapping[str, SupportsFloat]
    """name -> output of the loss reducer on this rank, UNSCALED, detached: a Python float or a
    0-dim tensor on any device.

    For the loss and its terms: a unit without trained tokens adds 0 and counts. Hand over a tensor
    that shares no memory with the loss: Megatron divides the loss in place.
    """

    num_tokens: SupportsFloat
    """Trained tokens by the FULL masks of the micro-batch, a whole number.

    Every CP rank gives the same. 0 says "no data": all sums are 0 then.
    """

    metrics: Sequence[Metric] = field(default=())
    """Metrics with a kind of their own, such as a sample count. Kept as a tuple."""

    diagnostics: Mapping[str, tuple[SupportsFloat, SupportsFloat]] = field(default_factory=dict)
    """name -> numerator and weight of what is watched and not minimised, such as an entropy.

    `LossReducer.diagnostic` gives both; a masked sum and a count of trained tokens will do as well.
    The report is the mean over the step's whole weight, so that a unit without trained tokens does
    not pull it to 0. Python floats or 0-dim tensors on any device; weights are not negative, and
    where one is 0 so is the numerator.
    """

    def __post_init__(self) -> None:
        """Refuse sums that are no mapping and metrics that are no records, naming the field.

        What they hold is looked at when a step is reduced.
        """
        if not isinstance(self.sums, Mapping):
            raise MetricsError(
                f"MicroBatchMetrics: sums is {type(self.sums).__name__}; give a mapping, {{name:"
                " reducer output}"
            )
        given: object = self.diagnostics
        if not isinstance(given, Mapping) or not all(map(_is_pair, given.values())):
            raise MetricsError(
                "MicroBatchMetrics: diagnostics is no mapping {name: (numerator, weight)}; give the"
                " pairs of LossReducer.diagnostic"
            )
        object.__setattr__(
            self, "metrics", tuple(listed_metrics(self.metrics, "MicroBatchMetrics: metrics"))
        )


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def step_contributions(
    sums: Sequence[Mapping[str, float]],
    num_tokens: Sequence[float],
    extra: Sequence[Sequence[Metric]],
    diagnostics: Sequence[Mapping[str, tuple[float, float]]] = (),
) -> list[Metric]:
    """Merge one rank's micro-batches into records that travel.

    Args:
        sums: per micro-batch, name -> reducer output.
        num_tokens: per micro-batch, trained tokens by the full masks.
        extra: per micro-batch, further metrics.
        diagnostics: per micro-batch, name -> numerator and weight; none where there are none.

    Returns:
        One `sum` record per name of `sums`, one for the tokens, one `mean` record per diagnostic,
        and the merged further metrics.

    Raises:
        KeyAgreementError: when a micro-batch reports other names than the first.
        MetricsError: when numbers contradict one another, as in `check_step_numbers`, or further
            metrics cannot merge or reuse a name.
    """
    given = list(diagnostics) or [{}] * len(sums)
    check_step_names(sums, given, extra)
    check_step_numbers(sums, num_tokens, given)
    further = [metric for metrics in extra for metric in metrics]
    return [
        *(
            Metric.of_sum(name, sum(float(values[name]) for values in sums), unit=REDUCER_OUTPUT)
            for name in (sums[0] if sums else ())
        ),
        *(
            Metric.of_mean(name, *_added([pairs[name] for pairs in given]), unit=DIAGNOSTIC)
            for name in (given[0] if given else ())
        ),
        Metric.of_sum(TRAINED_TOKENS, float(sum(num_tokens)), unit="token"),
        Metric.of_sum(CONTRADICTIONS, 0.0),
        *merge_metrics(further).values(),
    ]


def _added(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the sum of numerators and the sum of weights."""
    return sum(float(a) for a, _ in pairs), sum(float(b) for _, b in pairs)


def check_step_names(
    sums: Sequence[Mapping[str, object]],
    diagnostics: Sequence[Mapping[str, object]],
    extra: Sequence[Sequence[Metric]],
) -> None:
    """Check that the micro-batches of a rank report the same names, each of them once.

    Args:
        sums: as in `step_contributions`, like the rest; values are not looked at.
        diagnostics: as there.
        extra: as there.

    Raises:
        KeyAgreementError: when a micro-batch reports other names than the first.
        MetricsError: when a name is used twice, or further metrics cannot merge.
    """
    for reported in (sums, diagnostics):
        for k, values in enumerate(reported):
            told = difference(reported[0], values)
            if told:
                raise KeyAgreementError(
                    f"micro-batch {k} reports other metrics than micro-batch 0: it {told}; report"
                    " the same names from every micro-batch, fillers included"
                )
    further = merge_metrics([metric for metrics in extra for metric in metrics])
    own = [*(sums[0] if sums else ()), *(diagnostics[0] if diagnostics else ())]
    times = Counter([*own, TRAINED_TOKENS, CONTRADICTIONS, *further])
    clash = sorted(name for name in times if times[name] > 1)
    if clash:
        raise MetricsError(
            f"metric name {clash[0]!r} is used twice in one step; rename one of them"
        )


def check_step_numbers(
    sums: Sequence[Mapping[str, SupportsFloat]],
    num_tokens: Sequence[SupportsFloat],
    diagnostics: Sequence[Mapping[str, tuple[SupportsFloat, SupportsFloat]]],
    *,
    first: int = 0,
) -> None:
    """Check that the numbers of each micro-batch fit together.

    Args:
        sums: as in `step_contributions`, like the rest; numbers of any kind.
        num_tokens: as there.
        diagnostics: as there.
        first: number of the first micro-batch, for errors.

    Raises:
        MetricsError: when a token count is no whole number of at least 0, a micro-batch without
            tokens has sums, a weight is negative or not finite, or a weight of 0 has a numerator;
            it names the micro-batch and the metric.
    """
    batches = zip(sums, num_tokens, diagnostics, strict=True)
    for k, (values, tokens, pairs) in enumerate(batches, start=first):
        if not (finite_number(tokens, f"micro-batch {k}: num_tokens", at_least=0.0)).is_integer():
            raise MetricsError(
                f"micro-batch {k}: num_tokens is {tokens}; it counts the trained tokens of the full"
                " masks"
            )
        numbers = {
            name: number(value, f"micro-batch {k}: {name!r}") for name, value in values.items()
        }
        wrong = [name for name in numbers if not float(tokens) and numbers[name]]
        if wrong:
            raise MetricsError(
                f"micro-batch {k}: {wrong[0]!r} is {numbers[wrong[0]]} with num_tokens 0;"
                " without trained tokens every reducer output is 0, so count the tokens of the"
                " full masks"
            )
        for name, (numerator, weight) in pairs.items():
            what = f"micro-batch {k}: diagnostic {name!r}:"
            total = number(numerator, f"{what} the numerator")
            if not finite_number(weight, f"{what} the weight", at_least=0.0) and total:
                raise MetricsError(
                    f"{what} the numerator is {total} under weight 0; give its weight, such as"
                    " that of LossReducer.diagnostic"
                )


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
        metric
        for name, metric in reduced.items()
        if name not in {*names, TRAINED_TOKENS, CONTRADICTIONS}
    )
    clash = sorted(set(lines) & set(others))
    if clash:
        raise MetricsError(
            f"a reducer output and another metric both report under the name {clash[0]!r}; rename"
            " one of them"
        )
    return lines | others
