"""The arithmetic of the train step's report and of the rollout log, without processes."""

from collections.abc import Sequence
from typing import Any

import pytest

from rl_metrics import (
    KeyAgreementError,
    Metric,
    MetricsError,
    MicroBatchMetrics,
    merge_metrics,
    rollout_log_metric_contribution,
)
from rl_metrics.metric.step_report import finish_step_report, step_contributions, step_settings


def _report(
    sums: list[dict[str, float]], tokens: list[float], extra: Sequence[Metric] = (), **settings: Any
) -> dict[str, float | None]:
    given: dict[str, Any] = {
        "aggregation": "rollout_mean",
        "step_units": 2,
        "cp_size": 1,
    } | settings
    contributions = step_contributions(sums, tokens, [extra] if extra else [()] * len(sums))
    return finish_step_report(merge_metrics(contributions), set(sums[0]), **given)


def test_a_unit_mean_divides_by_the_steps_units() -> None:
    assert _report([{"loss": 2.0}, {"loss": 4.0}], [4, 2]) == {"loss": 3.0}


def test_a_token_mean_divides_by_tokens_counted_on_every_context_parallel_rank() -> None:
    assert _report(
        [{"loss": 10.0}, {"loss": 6.0}],
        [4, 4],
        aggregation="token_mean",
        step_units=None,
        cp_size=2,
    ) == {"loss": 4.0}


def test_a_step_without_trained_tokens_has_no_data() -> None:
    assert _report([{"loss": 0.0, "kl": 0.0}], [0]) == {"loss": None, "kl": None}


def test_further_metrics_report_by_their_own_kind() -> None:
    extra = [Metric.of_max("ratio_max", 7.0), Metric.of_sum("tokens", 5.0)]
    assert _report([{"loss": 2.0}], [4], extra) == {"loss": 1.0, "ratio_max": 7.0, "tokens": 5.0}


def test_micro_batches_must_report_the_same_names() -> None:
    with pytest.raises(
        KeyAgreementError, match=r"micro-batch 1 .*: it lacks 'loss' and adds 'kl'; report"
    ):
        step_contributions([{"loss": 1.0}, {"kl": 1.0}], [1, 1], [(), ()])
    with pytest.raises(KeyAgreementError, match=r"micro-batch 1 .*: it adds 'kl'; report"):
        step_contributions([{"loss": 1.0}, {"loss": 1.0, "kl": 1.0}], [1, 1], [(), ()])


def test_a_name_is_used_once_in_a_step() -> None:
    with pytest.raises(MetricsError, match="'loss' is used twice"):
        step_contributions([{"loss": 1.0}], [1], [[Metric.of_max("loss", 1.0)]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_units": None}, "step_units is None"),
        ({"step_units": 0}, "step_units is 0"),
        ({"step_units": float("inf")}, "step_units is inf"),
        ({"cp_size": 0}, "cp_size is 0; give an integer of at least 1"),
        ({"cp_size": 1.5}, "cp_size is 1.5"),
        ({"aggregation": "mean"}, "unknown loss aggregation 'mean'"),
    ],
)
def test_settings_that_make_no_mean_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        _report([{"loss": 1.0}], [1], **settings)


def test_settings_to_agree_on_do_not_depend_on_how_a_number_is_written() -> None:
    assert step_settings("rollout_mean", 8, 2) == step_settings("rollout_mean", 8.0, 2)
    assert step_settings("rollout_mean", 8, 2) == {
        "aggregation": "rollout_mean",
        "cp_size": "2",
        "step_units": "8.0",
    }
    assert step_settings("token_mean", 8, 2) == step_settings("token_mean", None, 2)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (-1, "micro-batch 1: num_tokens is -1; give a finite number of at least 0"),
        (float("nan"), "micro-batch 1: num_tokens is nan"),
        (float("inf"), "micro-batch 1: num_tokens is inf"),
        (2.5, "micro-batch 1: num_tokens is 2.5; it counts"),
        ("3", "micro-batch 1: num_tokens is str '3'"),
    ],
)
def test_a_token_count_that_is_none_is_named(tokens: Any, message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        step_contributions([{"loss": 0.0}] * 2, [1, tokens], [(), ()])


def test_a_micro_batch_without_tokens_has_no_sums() -> None:
    with pytest.raises(MetricsError, match=r"micro-batch 1: 'kl' is 5.0 with num_tokens 0"):
        step_contributions([{"loss": 1.0, "kl": 2.0}, {"loss": 0.0, "kl": 5.0}], [1, 0], [(), ()])


def test_a_reducer_output_is_no_metric_of_the_same_name() -> None:
    loss, *_ = step_contributions([{"loss": 1.0}], [1], [()])
    assert loss.describe() != Metric.of_sum("loss", 1.0).describe()


def test_rollout_contributions_add_up_to_the_units() -> None:
    records = [
        rollout_log_metric_contribution(
            "kl", value, aggregation="rollout_mean", step_tokens=9, step_units=8, group_size=4
        )
        for value in (4.0, 0.0, 10.0, 2.0)
    ]
    merged = merge_metrics(records)["kl"]
    assert (merged.value, merged.weight, merged.unit) == (2.0, 8.0, "rollout")


def test_rollout_tokens_are_counted_once() -> None:
    record = rollout_log_metric_contribution(
        "kl", 18.0, aggregation="token_mean", step_tokens=9, group_size=1
    )
    assert record.value == 2.0


def test_a_batch_without_trained_tokens_has_no_rollout_metric() -> None:
    record = rollout_log_metric_contribution(
        "kl", 0.0, aggregation="rollout_mean", step_tokens=0, step_units=4, group_size=2
    )
    assert record.value is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "metric 'kl': group_size is 0"),
        ({"group_size": 2.0}, "metric 'kl': group_size is 2.0"),
        ({"step_units": None}, "step_units is None"),
        ({"aggregation": "mean"}, "unknown loss aggregation"),
        ({"step_tokens": -1}, "metric 'kl': step_tokens is -1"),
        ({"step_tokens": float("nan")}, "metric 'kl': step_tokens is nan"),
        ({"step_tokens": 0}, "metric 'kl': reducer_sum is 1.0 with step_tokens 0"),
        ({"reducer_sum": [1.0]}, "metric 'kl': reducer_sum is list"),
    ],
)
def test_rollout_settings_that_make_no_mean_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {
        "reducer_sum": 1.0,
        "aggregation": "rollout_mean",
        "step_tokens": 1,
        "step_units": 1,
        "group_size": 1,
    } | settings
    with pytest.raises(MetricsError, match=message):
        rollout_log_metric_contribution("kl", **given)


def test_a_reducer_output_never_takes_the_line_of_another_metric() -> None:
    extra = [Metric.of_moments("x", [7.0, 9.0])]
    for name in ("x_mean", "x_std"):
        with pytest.raises(
            MetricsError,
            match=f"a reducer output and another metric both report under the name '{name}'",
        ):
            _report([{name: 10.0}], [2], extra)
    assert _report([{"x": 10.0}], [2], [Metric.of_max("x_mean", 1.0)]) == {"x": 5.0, "x_mean": 1.0}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"metrics": None}, "MicroBatchMetrics: metrics: got NoneType; give a list"),
        (
            {"metrics": Metric.of_max("a", 1.0)},
            "MicroBatchMetrics: metrics: got Metric; give a list",
        ),
        ({"metrics": [3.0]}, "a metric: got float"),
        ({"sums": [("a", 1.0)]}, "MicroBatchMetrics: sums is list; give a mapping"),
        ({"sums": None}, "MicroBatchMetrics: sums is NoneType; give a mapping"),
    ],
)
def test_fields_of_a_micro_batch_that_are_none_are_named(fields: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {"sums": {"a": 1.0}, "num_tokens": 1}
    with pytest.raises(MetricsError, match=told):
        MicroBatchMetrics(**(given | fields))


def test_further_metrics_are_kept_from_an_iterator_or_a_mapping() -> None:
    for metrics in (iter([Metric.of_max("r", 1.0)]), {"r": Metric.of_max("x", 1.0)}):
        given: Any = metrics
        assert MicroBatchMetrics(sums={}, num_tokens=0, metrics=given).metrics == (
            Metric.of_max("r", 1.0),
        )
