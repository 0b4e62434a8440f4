"""Moments and quantile sketches on worked numbers and at the edges of float64."""

import math
from typing import Any

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
def test_sketches_refuse_a_mask_of_another_shape(mask: list[Any]) -> None:
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
    top = float(np.finfo(np.float64).max)
    sketch = QuantileSketch.of([top, -top, 3e-308, 1e-320])
    assert sketch.quantile(1) == pytest.approx(top, rel=0.0101)
    assert sketch.quantile(0) == pytest.approx(-top, rel=0.0101)
    assert sketch.zero == 1
    assert sketch.quantile(0.7) == pytest.approx(3e-308, rel=0.0101)


def test_a_value_that_is_not_finite_makes_quantiles_nan_unless_masked() -> None:
    median = QuantileSketch.of([1.0, math.inf]).quantile(0.5)
    assert median is not None
    assert math.isnan(median)
    assert QuantileSketch.of([1.0, math.nan], [1, 0]).quantile(0.5) == pytest.approx(1, rel=0.0101)


@pytest.mark.parametrize("mask", [[1, 2], [0.5, 1], [-1, 1], [1, math.nan], ["1", "0"]])
def test_masks_of_moments_and_sketches_hold_nothing_but_0_and_1(mask: Any) -> None:
    for take in (Moments.of, QuantileSketch.of):
        with pytest.raises(MetricsError, match="the mask"):
            take([1.0, 2.0], mask)


@pytest.mark.parametrize("mask", [[True, False], [1, 0], [1.0, 0.0], np.array([1, 0], np.uint8), [1, -0.0]])
def test_masks_of_booleans_or_0_and_1_of_any_type_are_the_same(mask: Any) -> None:
    assert Moments.of([3.0, math.nan], mask) == Moments(count=1, mean=3)
    assert QuantileSketch.of([3.0, math.nan], mask).count == 1


@pytest.mark.parametrize(("q", "rank"), [(0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.74, 2), (0.75, 3), (0.99, 3), (1, 4)])
def test_a_percentile_is_the_lower_neighbour(q: float, rank: int) -> None:
    values = [1.0, 10.0, 100.0, 1000.0, 10000.0]
    assert QuantileSketch.of(values).quantile(q) == pytest.approx(values[rank], rel=0.0101)
    assert np.quantile(values, q, method="lower") == values[rank]


def test_scaled_sketches_merge_to_the_original() -> None:
    sketch = QuantileSketch.of([1.0, 10.0, 100.0])
    third = sketch.scaled(1 / 3)
    merged = third.merge(third).merge(third)
    assert [merged.quantile(q) for q in (0, 0.5, 1)] == [sketch.quantile(q) for q in (0, 0.5, 1)]


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
