"""Metric records on worked numbers: kinds, merging, no data, reports."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from rl_metrics import (
    Metric,
    MetricsError,
    Moments,
    QuantileSketch,
    merge_metrics,
    merge_moments,
    report,
)
from rl_metrics.metric.kinds import Kind

NAN = math.nan


def _merged(records: Iterable[Metric]) -> Metric:
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
    metric = _merged(
        [Metric.of_moments("x", [1, 2]), Metric.of_moments("x", [3, 6, 99], [1, 1, 0])]
    )
    assert metric.value == 3
    assert metric.moments == Moments(count=4, mean=3, m2=14)
    assert metric.report() == {"x_mean": 3, "x_std": math.sqrt(3.5)}


def test_a_histogram_reports_percentiles_within_its_bound() -> None:
    metric = _merged(
        [Metric.of_histogram("x", np.arange(1, 51)), Metric.of_histogram("x", np.arange(51, 102))]
    )
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
def test_no_data_is_none_and_not_zero(kind: Kind) -> None:
    empty = Metric.empty("x", kind)
    assert empty.value is None
    assert all(value is None for value in empty.report().values())
    assert empty.merge(empty).value is None


def test_a_true_zero_is_data() -> None:
    assert Metric.of_sum("x", 0).value == 0.0
    assert Metric.of_mean("x", 0, 3).value == 0.0


def test_extrema_of_nan_are_nan() -> None:
    assert math.isnan(_merged([Metric.of_min("x", 1), Metric.of_min("x", NAN)]).numerator)
    assert math.isnan(_merged([Metric.of_max("x", NAN), Metric.of_max("x", 1)]).numerator)


def test_replicated_values_count_once() -> None:
    copies = [Metric.of_sum("x", 6).replicated(4)] * 4
    assert _merged(copies).value == 6
    assert _merged([Metric.of_max("x", 6).replicated(4)] * 4).value == 6
    moments = _merged([Metric.of_moments("x", [1, 2, 3, 6]).replicated(2)] * 2).moments
    assert (moments.count, moments.mean, moments.m2) == (4, 3, 14)
    sketch = _merged([Metric.of_histogram("x", [1.0, 2.0, 3.0]).replicated(3)] * 3).sketch
    assert sketch is not None
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
def test_unlike_records_do_not_merge(other: Metric, message: str) -> None:
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
        ({"sketch": "x", "kind": "histogram"}, "exactly the kind 'histogram' carries a sketch"),
        ({"name": 3}, "needs a name, got 3"),
        ({"kind": ["sum"]}, r"kind is \['sum'\]"),
        ({"unit": None}, "metric 'x': unit is None"),
        ({"numerator": "5"}, "metric 'x': numerator is str '5'; give one number"),
        ({"numerator": None}, "metric 'x': numerator is NoneType"),
        (
            {"numerator": np.ones(2)},
            r"metric 'x': numerator is ndarray of shape \(2,\); give one number",
        ),
        ({"numerator": 10**400}, "metric 'x': numerator is int"),
        ({"weight": 0.0}, "metric 'x': numerator is 1.0 under weight 0"),
        ({"kind": "min", "weight": 0.0}, "metric 'x': numerator is 1.0 under weight 0"),
        ({"m2": 1.0}, "metric 'x': m2 is 1.0"),
        ({"kind": "moments", "m2": -1.0}, "metric 'x': m2 is -1.0"),
        ({"stamp": 1.0}, "metric 'x': stamp is 1.0"),
        ({"kind": "last", "stamp": NAN}, "metric 'x': stamp is nan"),
    ],
)
def test_records_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"name": "x", "kind": "sum", "numerator": 1.0, "weight": 1.0} | fields
    with pytest.raises(MetricsError, match=message):
        Metric(**given)


@pytest.mark.parametrize(
    ("numerator", "weight"), [(5, 0), (NAN, 0), (5, -1), (5, math.inf), (5, NAN)]
)
def test_a_mean_needs_a_weight_under_its_numerator(numerator: float, weight: float) -> None:
    with pytest.raises(MetricsError, match="metric 'x': "):
        Metric.of_mean("x", numerator, weight)
    assert Metric.of_mean("x", 0, 0).value is None


def test_numbers_of_any_library_become_python_floats() -> None:
    metric = Metric(
        name="x", kind="mean", numerator=cast("Any", np.float32(1)), weight=cast("Any", np.int64(2))
    )
    assert (type(metric.numerator), type(metric.weight), metric.value) == (float, float, 0.5)


WRONG: Any = "x"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Metric.of_sum("a", WRONG), "metric 'a': the value is str 'x'; give one number"),
        (lambda: Metric.of_sum("a", cast("Any", [1.0])), "metric 'a': the value is list"),
        (lambda: Metric.of_mean("a", WRONG, 1), "metric 'a': the numerator is str"),
        (lambda: Metric.of_mean("a", 1, WRONG), "metric 'a': the weight is str"),
        (lambda: Metric.of_min("a", WRONG), "metric 'a': the value is str"),
        (lambda: Metric.of_max("a", WRONG), "metric 'a': the value is str"),
        (lambda: Metric.of_last("a", WRONG, stamp=1), "metric 'a': the value is str"),
        (lambda: Metric.of_last("a", 1, stamp=WRONG), "metric 'a': the stamp .* is str"),
        (
            lambda: Metric.of_moments("a", [[1.0], [1.0, 2.0]]),
            "metric 'a': the values: cannot be read as an array of numbers",
        ),
        (
            lambda: Metric.of_moments("a", [WRONG]),
            "metric 'a': the values: entries are of type <U1",
        ),
        (
            lambda: Metric.of_moments("a", [1.0, 2.0], [1, 2]),
            "metric 'a': the mask holds 2 at index 1",
        ),
        (
            lambda: Metric.of_histogram("a", [1.0], [1, 1]),
            r"metric 'a': values have shape \(1,\) but the mask \(2,\)",
        ),
        (
            lambda: Metric.of_histogram("a", [[1.0, 2.0]], [[1.0, 0.5]]),
            "metric 'a': the mask holds 0.5 at index 0, 1",
        ),
        (lambda: Metric.from_moments("a", WRONG), "metric 'a': moments is str"),
        (
            lambda: Metric.of_sum("a", 1).merge(cast("Any", 3)),
            "cannot merge metric 'a' with it: got int",
        ),
        (
            lambda: merge_metrics(cast("Any", [3])),
            "a metric: got int, whose way to merge is not declared",
        ),
        (lambda: merge_metrics(Metric.of_sum("a", 1)), "metrics: got Metric; give a list"),  # type: ignore[arg-type]
        (lambda: merge_metrics(cast("Any", 3)), "metrics: got int; give a list"),
        (
            lambda: report(cast("Any", {"a": 1.0})),
            "a: got float, whose way to merge is not declared",
        ),
        (lambda: Moments().merge(cast("Any", 3)), "cannot merge moments with int"),
        (lambda: merge_moments(cast("Any", [3])), "cannot merge moments with int"),
        (lambda: merge_moments(cast("Any", 3)), "moments to merge: got int; give a list"),
        (lambda: Moments.of([1.0]).variance(ddof=cast("Any", 0.5)), "ddof is 0.5"),
        (lambda: Metric.empty("a", cast("Any", np.ones(2))), "metric 'a': kind is array"),
        (
            lambda: Metric.of_sum("a", 1).replicated(10**400),
            "metric 'a': copies .* is beyond float64",
        ),
        (
            lambda: Metric.of_sum("a", 1).replicated(10**20),
            r"metric 'a': copies .* is 1e\+20; give an integer of at most 2\^53",
        ),
        (lambda: Moments(count=-1), "the count of moments is -1"),
        (lambda: Moments(count=1, m2=-1), "the m2 of moments is -1"),
        (lambda: Moments(mean=WRONG), "the mean of moments is str"),
        (lambda: QuantileSketch().merge(cast("Any", 3)), "cannot merge a sketch with int"),
        (
            lambda: QuantileSketch().scaled(-1),
            "the factor of a sketch is -1; give a finite number above 0",
        ),
        (lambda: QuantileSketch(zero=-1), "the weight 'zero' of a sketch is -1"),
        (
            lambda: QuantileSketch(positive_indices=np.array([1])),
            "a sketch has 1 positive buckets but 0 counts",
        ),
        (lambda: QuantileSketch().quantile(WRONG), "the quantile is str"),
        (lambda: QuantileSketch(relative_error=WRONG), "relative_error is str"),
    ],
)
def test_every_wrong_argument_is_an_error_of_this_package_that_names_it(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(MetricsError, match=message):
        call()


def test_misuse_is_explained() -> None:
    with pytest.raises(MetricsError, match="only 'moments' has moments"):
        _ = Metric.of_sum("x", 1).moments
    for copies in (0, 1.5, 2.0, "2", True):
        with pytest.raises(
            MetricsError, match=r"metric 'x': copies .* give an integer of at least 1"
        ):
            Metric.of_sum("x", 1).replicated(cast("Any", copies))
    with pytest.raises(MetricsError, match=r"metric 'x': the stamp .* is inf"):
        Metric.of_last("x", 1, stamp=math.inf)


def test_describe_names_what_must_agree() -> None:
    assert Metric.of_mean("loss", 1, 1, unit="token").describe() == "loss (mean, token)"
    assert Metric.of_histogram("h", [1.0]).describe() == "h (histogram, error 0.01)"


def test_records_of_equal_fields_are_equal() -> None:
    assert Metric.of_histogram("x", [1.0, 2.0]) == Metric.of_histogram("x", [2.0, 1.0])
    assert hash(Metric.of_histogram("x", [1.0])) == hash(Metric.of_histogram("x", [1.0]))
    assert Metric.of_histogram("x", [1.0]) != Metric.of_histogram("x", [2.0])


def test_a_histogram_weighs_what_its_sketch_holds() -> None:
    with pytest.raises(MetricsError, match=r"metric 'x': weight is 5.0 but the sketch holds 0.0"):
        Metric(name="x", kind="histogram", numerator=1, weight=5, sketch=QuantileSketch())
    with pytest.raises(MetricsError, match=r"weight is 1.0 but the sketch holds 2.0"):
        replace(Metric.of_histogram("x", [1.0, 2.0]), weight=1.0)


@pytest.mark.parametrize("values", [[], [1.0, 2.0]])
def test_sketches_of_different_bounds_do_not_merge_in_either_order(values: list[float]) -> None:
    record, empty = (
        Metric.of_histogram("x", values, relative_error=0.05),
        Metric.empty("x", "histogram"),
    )
    for one, other in ((record, empty), (empty, record)):
        with pytest.raises(MetricsError, match="cannot merge sketches of relative error"):
            one.merge(other)


@pytest.mark.parametrize("copies", range(1, 17))
def test_shares_are_quotients(copies: int) -> None:
    assert Metric.of_sum("x", 7).replicated(copies).numerator == 7 / copies
    merged = _merged([Metric.of_sum("x", 7).replicated(copies)] * copies)
    assert merged.value == pytest.approx(7, rel=1e-15)
    assert merged.weight == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize("text", ["a\udcff", "\ud800"])
def test_text_that_utf_8_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(MetricsError, match=r"name is '.*\\ud.*', which UTF-8 cannot hold"):
        Metric.of_sum(text, 1)
    with pytest.raises(
        MetricsError, match=r"metric 'x': unit is '.*\\ud.*', which UTF-8 cannot hold"
    ):
        Metric.of_sum("x", 1, unit=text)


@pytest.mark.parametrize("value", [1 + 2j, np.complex128(1 + 2j), np.complex64(1)])
def test_complex_numbers_are_no_numbers(value: Any) -> None:
    with pytest.raises(
        MetricsError, match=r"metric 'x': the value is complex.*, a complex number; give a real one"
    ):
        Metric.of_sum("x", value)


def test_a_mapping_reports_under_its_keys() -> None:
    merged = merge_metrics([Metric.of_sum("a", 1), Metric.of_sum("a", 2), Metric.of_max("b", 5)])
    assert report(merged) == report(merged.values()) == {"a": 3, "b": 5}
    assert report({"c": Metric.of_sum("a", 1)}) == {"c": 1}
    assert merge_metrics(merged) == merged


def test_errors_inside_a_callers_generator_are_the_callers() -> None:
    def broken() -> Iterator[Metric]:
        yield Metric.of_sum("a", 1)
        raise TypeError("mine")

    for call in (merge_metrics, report):
        with pytest.raises(TypeError, match=r"^mine$"):
            call(broken())
