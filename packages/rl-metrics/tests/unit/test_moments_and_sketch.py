"""Moments and quantile sketches on worked numbers and at the edges of float64."""

import math

import numpy as np
import pytest

from rl_metrics import MetricsError, Moments, QuantileSketch, merge_moments


def test_variance_of_a_narrow_distribution_far_from_zero() -> None:
    # One pass in float32 gives about 1.8e-4 here instead of 1e-4.
    values = np.random.default_rng(0).normal(30, 0.01, 100_000).astype(np.float32)
    parts = [Moments.of(part) for part in np.array_split(values, 7)]
    assert merge_moments(parts).variance() == pytest.approx(np.var(values.astype(np.float64)), rel=1e-12)
    assert merge_moments(parts).variance() == pytest.approx(1e-4, rel=0.02)


def test_moments_of_nothing() -> None:
    empty = Moments.of([])
    assert empty == Moments()
    assert empty.variance() is None
    assert empty.standard_deviation() is None
    assert Moments.of([math.nan], [0]) == Moments()


def test_the_unbiased_variance_needs_two_values() -> None:
    assert Moments.of([5]).variance() == 0
    assert Moments.of([5]).variance(ddof=1) is None
    assert Moments.of([1, 2, 3]).variance(ddof=1) == 1


@pytest.mark.parametrize("mask", [[1, 0], [1], [[1, 0], [1, 0], [1, 0]]])
def test_sketches_refuse_a_mask_of_another_shape(mask) -> None:
    with pytest.raises(MetricsError, match="but the mask"):
        QuantileSketch.of([[1, 2], [3, 4]], mask)


def test_moments_refuse_a_mask_of_another_shape() -> None:
    with pytest.raises(MetricsError, match=r"values have shape \(2,\) but the mask \(3,\)"):
        Moments.of([1, 2], [1, 1, 1])


def test_quantiles_of_few_values_are_those_values() -> None:
    sketch = QuantileSketch.of([-4.0, 0.0, 1.0, 2.0, 300.0])
    assert [sketch.quantile(q) for q in (0, 0.25, 0.5, 0.75, 1)] == [
        pytest.approx(-4, rel=0.0101),
        0.0,
        pytest.approx(1, rel=0.0101),
        pytest.approx(2, rel=0.0101),
        pytest.approx(300, rel=0.0101),
    ]


def test_the_largest_and_smallest_floats_have_buckets() -> None:
    top = np.finfo(np.float64).max
    sketch = QuantileSketch.of([top, -top, 3e-308, 1e-320])
    assert sketch.quantile(1) == pytest.approx(top, rel=0.0101)
    assert sketch.quantile(0) == pytest.approx(-top, rel=0.0101)
    assert sketch.zero == 1
    assert sketch.quantile(0.7) == pytest.approx(3e-308, rel=0.0101)


def test_a_value_that_is_not_finite_makes_quantiles_nan_unless_masked() -> None:
    assert math.isnan(QuantileSketch.of([1.0, math.inf]).quantile(0.5))
    assert QuantileSketch.of([1.0, math.nan], [1, 0]).quantile(0.5) == pytest.approx(1, rel=0.0101)


def test_a_sketch_stays_small() -> None:
    values = np.random.default_rng(0).lognormal(0, 3, 200_000)
    sketch = QuantileSketch.of(values)
    assert sketch.positive_indices.size <= 1400
    assert sketch.count == 200_000


def test_no_data_has_no_quantile() -> None:
    assert QuantileSketch().quantile(0.5) is None
    assert QuantileSketch.of([]).count == 0


def test_settings_outside_their_range_are_refused() -> None:
    with pytest.raises(MetricsError, match="relative_error is 1"):
        QuantileSketch(relative_error=1)
    with pytest.raises(MetricsError, match=r"quantile 1\.5"):
        QuantileSketch().quantile(1.5)
