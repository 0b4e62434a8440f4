"""Metric records on worked numbers: kinds, merging, no data, reports."""

import math

import numpy as np
import pytest

from rl_metrics import Metric, MetricsError, Moments, merge_metrics, report

NAN = math.nan


def _merged(records):
    (metric,) = merge_metrics(records).values()
    return metric


def test_each_kind_merges_as_declared() -> None:
    assert _merged([Metric.of_sum("x", 2), Metric.of_sum("x", 3)]).value == 5
    assert _merged([Metric.of_mean("x", 50, 100), Metric.of_mean("x", 270, 900)]).value == 0.32
    assert _merged([Metric.of_min("x", 2), Metric.of_min("x", -3)]).value == -3
    assert _merged([Metric.of_max("x", 2), Metric.of_max("x", -3)]).value == 2
    assert _merged([Metric.of_last("x", 2, stamp=7), Metric.of_last("x", 9, stamp=6)]).value == 2
    assert _merged([Metric.of_last("x", 2, stamp=7), Metric.of_last("x", 4, stamp=7)]).value == 3


def test_moments_merge_to_the_moments_of_all() -> None:
    metric = _merged([Metric.of_moments("x", [1, 2]), Metric.of_moments("x", [3, 6, 99], [1, 1, 0])])
    assert metric.value == 3
    assert metric.moments == Moments(count=4, mean=3, m2=14)
    assert metric.report() == {"x_mean": 3, "x_std": math.sqrt(3.5)}


def test_a_histogram_reports_percentiles_within_its_bound() -> None:
    metric = _merged([Metric.of_histogram("x", np.arange(1, 51)), Metric.of_histogram("x", np.arange(51, 102))])
    assert metric.value == pytest.approx(51, rel=0.0101)
    assert metric.report() == {
        "x_p50": pytest.approx(51, rel=0.0101),
        "x_p90": pytest.approx(91, rel=0.0101),
        "x_p99": pytest.approx(100, rel=0.0101),
    }


def test_the_name_is_never_looked_into() -> None:
    for name in ("minibatch_loss", "max_reward", "terminal_reward", "loss_sum"):
        assert _merged([Metric.of_mean(name, 1, 1), Metric.of_mean(name, 3, 1)]).value == 2


@pytest.mark.parametrize("kind", ["sum", "mean", "min", "max", "moments", "last", "histogram"])
def test_no_data_is_none_and_not_zero(kind: str) -> None:
    empty = Metric.empty("x", kind)
    assert empty.value is None
    assert all(value is None for value in empty.report().values())
    assert empty.merge(empty).value is None


def test_a_true_zero_is_data() -> None:
    assert Metric.of_sum("x", 0).value == 0.0
    assert Metric.of_mean("x", 0, 3).value == 0.0


def test_extrema_of_nan_are_nan() -> None:
    assert math.isnan(_merged([Metric.of_min("x", 1), Metric.of_min("x", NAN)]).value)
    assert math.isnan(_merged([Metric.of_max("x", NAN), Metric.of_max("x", 1)]).value)


def test_replicated_values_count_once() -> None:
    copies = [Metric.of_sum("x", 6).replicated(4)] * 4
    assert _merged(copies).value == 6
    assert _merged([Metric.of_max("x", 6).replicated(4)] * 4).value == 6
    moments = _merged([Metric.of_moments("x", [1, 2, 3, 6]).replicated(2)] * 2).moments
    assert (moments.count, moments.mean, moments.m2) == (4, 3, 14)
    sketch = _merged([Metric.of_histogram("x", [1.0, 2.0, 3.0]).replicated(3)] * 3).sketch
    assert sketch.count == pytest.approx(3)
    assert sketch.quantile(0.5) == pytest.approx(2, rel=0.0101)


def test_report_joins_many_metrics_and_refuses_to_overwrite() -> None:
    assert report([Metric.of_sum("a", 1), Metric.empty("b", "mean")]) == {"a": 1, "b": None}
    with pytest.raises(MetricsError, match="two metrics report under the name 'x_mean'"):
        report([Metric.of_moments("x", [1.0]), Metric.of_sum("x_mean", 1)])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Metric.of_sum("y", 1), "name is 'x' here and 'y' there"),
        (Metric.of_mean("x", 1, 1), "kind is 'sum' here and 'mean' there"),
        (Metric.of_sum("x", 1, unit="token"), "unit is '' here and 'token' there"),
    ],
)
def test_unlike_records_do_not_merge(other, message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        Metric.of_sum("x", 1).merge(other)


def test_sketches_of_different_bounds_do_not_merge() -> None:
    with pytest.raises(MetricsError, match=r"relative error 0\.01 and 0\.02"):
        Metric.of_histogram("x", [1.0]).merge(Metric.of_histogram("x", [1.0], relative_error=0.02))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "needs a name"),
        ({"kind": "median"}, "kind is 'median'; use one of sum, mean"),
        ({"weight": -1.0}, "weight is -1.0"),
        ({"weight": NAN}, "weight is nan"),
        ({"kind": "histogram"}, "exactly the kind 'histogram' carries a sketch"),
    ],
)
def test_records_that_mean_nothing_are_refused(fields, message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        Metric(**({"name": "x", "kind": "sum", "numerator": 1.0, "weight": 1.0} | fields))


def test_misuse_is_explained() -> None:
    with pytest.raises(MetricsError, match="only 'moments' has moments"):
        _ = Metric.of_sum("x", 1).moments
    with pytest.raises(MetricsError, match="copies is 0"):
        Metric.of_sum("x", 1).replicated(0)
    with pytest.raises(MetricsError, match="stamp is inf"):
        Metric.of_last("x", 1, stamp=math.inf)


def test_describe_names_what_must_agree() -> None:
    assert Metric.of_mean("loss", 1, 1, unit="token").describe() == "loss (mean, token)"
    assert Metric.of_histogram("h", [1.0]).describe() == "h (histogram, error 0.01)"
