"""What is watched is averaged over what there is; what is minimised keeps the divisor of all."""

import math
from typing import Any

import pytest

from rl_metrics import (
    AGGREGATIONS,
    Aggregation,
    KeyAgreementError,
    MetricsError,
    MicroBatchMetrics,
    loss_denominators,
    merge_metrics,
    rollout_log_diagnostic,
)
from rl_metrics.aggregation.loss_reduction import aggregate, aggregate_diagnostic
from rl_metrics.metric.step_report import finish_step_report, step_contributions

HALF_MASKED: Any = [[1, 1, 0], [0, 0], [1], [0]]
IDS = {"rollout_ids": ["a", "b", "c", "d"], "group_ids": ["x", "y", "x", "y"]}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_constant_diagnostic_is_that_constant_however_many_rollouts_are_masked(
    aggregation: Aggregation,
) -> None:
    values: Any = [[2.0 if trained else math.nan for trained in mask] for mask in HALF_MASKED]
    assert aggregate_diagnostic(aggregation, values, HALF_MASKED, **IDS) == 2.0


@pytest.mark.parametrize(
    ("aggregation", "loss"),
    [
        ("token_mean", 2.0),
        ("sample_mean", 1.0),
        ("rollout_mean", 1.0),
        ("prompt_mean", 1.0),
        ("constant", 0.6),
    ],
)
def test_the_loss_keeps_the_divisor_of_all_units(aggregation: Aggregation, loss: float) -> None:
    # 3 trained tokens of 2.0 in 2 of 4 rollouts and 1 of 2 groups; the constant is 10.
    values: Any = [[2.0] * len(mask) for mask in HALF_MASKED]
    got = aggregate(aggregation, values, HALF_MASKED, **IDS, constant=10)
    assert got == pytest.approx(loss, rel=1e-15)


def test_unequal_rollouts_weigh_the_same_in_a_diagnostic() -> None:
    # Rollout a: (1 + 3) / 2 = 2; rollout b: 8, of one token; rollout c is masked: (2 + 8) / 2.
    masks = [[1, 1], [0, 1], [0]]
    values: Any = [[1.0, 3.0], [math.inf, 8.0], [5.0]]
    ids = {"rollout_ids": ["a", "b", "c"]}
    assert aggregate_diagnostic("rollout_mean", values, masks, **ids) == 5.0
    assert aggregate_diagnostic("token_mean", values, masks) == 4.0
    assert aggregate_diagnostic("rollout_mean", values, [[0, 0], [0, 0], [0]], **ids) is None


def _report(
    batches: list[tuple[float, float, float, float]], **settings: Any
) -> dict[str, float | None]:
    """Report of micro-batches: loss, tokens, numerator and weight of an entropy."""
    contributions = step_contributions(
        [{"loss": loss} for loss, *_ in batches],
        [tokens for _, tokens, *_ in batches],
        [()] * len(batches),
        [{"entropy": (numerator, weight)} for *_, numerator, weight in batches],
    )
    given: dict[str, Any] = {"aggregation": "rollout_mean", "step_units": 4, "cp_size": 1}
    return finish_step_report(merge_metrics(contributions), {"loss"}, **given | settings)


def test_a_step_divides_a_diagnostic_by_its_own_weight() -> None:
    # Two rollouts with entropy 2.0 in two micro-batches, two more fully masked.
    report = _report([(2.0, 2, 2.0, 1.0), (2.0, 1, 2.0, 1.0), (0.0, 0, 0.0, 0.0)])
    assert report == {"loss": 1.0, "entropy": 2.0}
    assert _report([(0.0, 0, 0.0, 0.0)]) == {"loss": None, "entropy": None}


@pytest.mark.parametrize("cp_size", [1, 2])
def test_context_parallel_parts_of_a_diagnostic_need_no_factor(cp_size: int) -> None:
    # The parts of one rollout of four tokens, whose masks both ranks know in full.
    part = (0.5 * 4 / cp_size, 4.0, 3.0 / cp_size, 1.0 / cp_size)
    settings = {"step_units": 1, "cp_size": cp_size}
    assert _report([part] * cp_size, **settings) == {"loss": 2.0, "entropy": 3.0}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((0.0, 0, 1.0, 0.0), "micro-batch 0: diagnostic 'entropy': the numerator is 1.0 under"),
        ((0.0, 0, 0.0, -1.0), "diagnostic 'entropy': the weight is -1; give a finite number of"),
        ((0.0, 0, 0.0, math.nan), "diagnostic 'entropy': the weight is nan"),
        ((0.0, 1, "x", 1.0), "diagnostic 'entropy': the numerator is str 'x'"),
    ],
)
def test_numbers_of_a_diagnostic_that_contradict_are_named(batch: Any, message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        _report([batch])


def test_names_of_diagnostics_are_those_of_every_micro_batch_and_used_once() -> None:
    with pytest.raises(
        KeyAgreementError, match=r"micro-batch 1 .*: it lacks 'kl' and adds 'ratio'"
    ):
        step_contributions([{}, {}], [1, 1], [(), ()], [{"kl": (0.0, 1.0)}, {"ratio": (0.0, 1.0)}])
    with pytest.raises(MetricsError, match="'loss' is used twice"):
        step_contributions([{"loss": 1.0}], [1], [()], [{"loss": (1.0, 1.0)}])


@pytest.mark.parametrize("diagnostics", [[], {"kl": 1.0}, {"kl": [1.0, 2.0]}, {"kl": (1.0,)}])
def test_diagnostics_are_pairs_by_name(diagnostics: Any) -> None:
    with pytest.raises(MetricsError, match=r"give the pairs of LossReducer\.diagnostic"):
        MicroBatchMetrics(sums={}, num_tokens=1, diagnostics=diagnostics)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_rollout_log_averages_a_diagnostic_alike(aggregation: Aggregation) -> None:
    denominators = loss_denominators(aggregation, HALF_MASKED, **IDS)
    records = [
        rollout_log_diagnostic("e", 2.0 * sum(mask) / d, sum(mask) / d, aggregation=aggregation)
        for mask, d in zip(HALF_MASKED, denominators, strict=True)
    ]
    assert merge_metrics(records)["e"].value == pytest.approx(2.0, rel=1e-15)


def test_a_diagnostic_of_the_rollout_log_is_checked() -> None:
    wrong: Any = "mean"
    with pytest.raises(MetricsError, match="unknown loss aggregation"):
        rollout_log_diagnostic("e", 1.0, 1.0, aggregation=wrong)
    with pytest.raises(MetricsError, match="under weight 0"):
        rollout_log_diagnostic("e", 1.0, 0.0, aggregation="rollout_mean")
    assert rollout_log_diagnostic("e", 0.0, 0.0, aggregation="constant").unit == "token"
