"""A percentile lies within the data, whatever way the records took; the ends are exact."""

import math
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_metrics import Metric, MetricsError, QuantileSketch
from rl_metrics.metric import wire

numbers = st.floats(allow_nan=False, allow_infinity=False)
values_of_a_rank = st.lists(numbers, max_size=8)


def _reduced(ranks: list[Metric]) -> Metric:
    """Merge one histogram of every rank as the two all-reduces do."""
    agreed = np.max([wire.extrema([metric]) for metric in ranks], axis=0)
    summed = np.sum([wire.sums([metric], agreed) for metric in ranks], axis=0)
    (merged,) = wire.unpack(ranks[:1], agreed, summed)
    return merged


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 3], 1.0),
        ([3, 1], 1.0),
        ([-3, -3], -3.0),
        ([7.3], 7.3),
        ([-7.3], -7.3),
        ([0.0, 0.0], 0.0),
        ([1e-310, 2.0], 1e-310),
        ([1.7e308], 1.7e308),
    ],
)
def test_percentiles_of_one_or_two_values_are_the_lower_one(
    values: list[float], expected: float
) -> None:
    # Rank floor(q (n - 1)) is 0 for q = 0.5, 0.9 and 0.99.
    lines = Metric.of_histogram("x", values, relative_error=0.01).report()
    assert lines == {"x_p50": expected, "x_p90": expected, "x_p99": expected}


@given(
    st.lists(values_of_a_rank, min_size=1, max_size=4).filter(any),
    st.floats(0, 1),
    st.sampled_from([1e-3, 0.01, 0.5]),
)
def test_a_percentile_lies_within_the_data_after_merging_and_over_ranks(
    parts: list[list[float]], q: float, bound: float
) -> None:
    data = [x for part in parts for x in part]
    sketches = [QuantileSketch.of(part, relative_error=bound) for part in parts]
    merged = reduce(QuantileSketch.merge, sketches)
    thirds = reduce(QuantileSketch.merge, [merged.scaled(1 / 3)] * 3)
    assert merged.bounds == thirds.bounds == (min(data), max(data))
    for sketch in (merged, thirds):
        estimate = sketch.quantile(q)
        assert estimate is not None
        assert min(data) <= estimate <= max(data)
    assert (merged.quantile(0), merged.quantile(1)) == (min(data), max(data))


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=8), min_size=1, max_size=4).filter(any))
def test_least_and_greatest_value_travel_exactly(parts: list[list[float]]) -> None:
    data = [x for part in parts for x in part]
    over_ranks = _reduced([Metric.of_histogram("x", part) for part in parts])
    assert over_ranks.sketch is not None
    assert over_ranks.sketch.bounds == (min(data), max(data))
    assert over_ranks.sketch == QuantileSketch.of(data)


def test_values_that_are_not_finite_are_neither_least_nor_greatest() -> None:
    sketch = QuantileSketch.of([math.nan, 2.0, math.inf, -math.inf])
    assert sketch.bounds == (2.0, 2.0)
    assert QuantileSketch.of([math.nan]).bounds == QuantileSketch().bounds == (math.inf, -math.inf)
    assert QuantileSketch.of([5.0, 2.0], mask=[0, 1]).bounds == (2.0, 2.0)


def test_buckets_given_without_bounds_take_those_of_their_answers() -> None:
    sketch = QuantileSketch(positive_indices=np.array([0, 9]), positive_counts=np.array([1.0, 2.0]))
    assert sketch.bounds == (sketch.quantile(0), sketch.quantile(1))
    assert sketch.bounds == pytest.approx((0.99, 0.99 * (1.01 / 0.99) ** 9))


@pytest.mark.parametrize(
    ("zero", "low", "high"),
    [(1.0, 2.0, 1.0), (1.0, math.nan, 1.0), (1.0, 0.0, math.inf), (0.0, 1.0, 2.0)],
)
def test_bounds_that_no_data_has_are_refused(zero: float, low: float, high: float) -> None:
    with pytest.raises(MetricsError, match="minimum and maximum of a sketch are"):
        QuantileSketch(zero=zero, minimum=low, maximum=high)
