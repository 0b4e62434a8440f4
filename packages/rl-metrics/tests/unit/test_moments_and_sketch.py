"""Moments and quantile sketches on worked numbers and at the edges of float64."""

import itertools
import json
import math
from typing import Any, cast

import numpy as np
import pytest

from rl_metrics import MetricsError, Moments, QuantileSketch, merge_moments


def test_variance_of_a_narrow_distribution_far_from_zero() -> None:
    # One pass in float32 gives about 1.8e-4 here instead of 1e-4.
    values = np.random.default_rng(0).normal(30, 0.01, 100_000).astype(np.float32)
    parts = [Moments.of(part) for part in np.array_split(values, 7)]
    assert merge_moments(parts).variance() == pytest.approx(
        np.var(values.astype(np.float64)), rel=1e-12
    )
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


@pytest.mark.parametrize(
    "mask", [[True, False], [1, 0], [1.0, 0.0], np.array([1, 0], np.uint8), [1, -0.0]]
)
def test_masks_of_booleans_or_0_and_1_of_any_type_are_the_same(mask: Any) -> None:
    assert Moments.of([3.0, math.nan], mask) == Moments(count=1, mean=3)
    assert QuantileSketch.of([3.0, math.nan], mask).count == 1


@pytest.mark.parametrize(
    ("q", "rank"), [(0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.74, 2), (0.75, 3), (0.99, 3), (1, 4)]
)
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


@pytest.mark.parametrize(
    "parts",
    [
        [[math.inf], [1.0]],
        [[math.inf], [math.inf]],
        [[-math.inf], [2.0], [3.0]],
        [[math.inf], [-math.inf]],
        [[math.nan], [1.0]],
        [[math.inf, 1.0], [math.nan]],
    ],
)
def test_infinities_merge_in_any_order_to_the_moments_of_all_values(
    parts: list[list[float]],
) -> None:
    whole = Moments.of([value for part in parts for value in part])
    for order in itertools.permutations(parts):
        merged = merge_moments(Moments.of(part) for part in order)
        assert repr(merged) == repr(whole)


def test_means_whose_sum_exceeds_float64_are_found() -> None:
    assert Moments.of([1e308] * 2) == Moments(count=2, mean=1e308)
    assert Moments.of([1e308] * 2).merge(Moments.of([1e308] * 4)) == Moments(count=6, mean=1e308)
    assert Moments.of([1.5e308]).merge(Moments.of([-1.5e308])) == Moments(
        count=2, mean=0, m2=math.inf
    )


def test_percentiles_of_a_billion_values_are_told_apart() -> None:
    few, many = QuantileSketch.of([1.0]), QuantileSketch.of([100.0])
    for _ in range(30):
        few, many = few.merge(few), many.merge(many)
    both = few.merge(many)
    assert both.count == 2.0**31
    assert both.quantile(0.5) == pytest.approx(1, rel=0.0101), (
        "the rank floor(0.5 (n - 1)) is the last 1"
    )
    # One value of 2 among 2^30 of 1: it is the last, and no slack may reach it.
    assert few.merge(QuantileSketch.of([2.0])).quantile(1 - 1e-9) == pytest.approx(1, rel=0.0101)


@pytest.mark.parametrize("bound", [1e-13, 1e-300, 0.0, -0.1, 1.0, math.nan])
def test_bounds_that_float64_cannot_keep_are_refused(bound: float) -> None:
    with pytest.raises(MetricsError, match="it must lie between 1e-12 and 1"):
        QuantileSketch(relative_error=bound)


@pytest.mark.parametrize("bound", [np.float64(0.01), np.float32(0.01), np.float16(0.25)])
def test_bounds_are_python_floats(bound: Any) -> None:
    sketch = QuantileSketch.of([1.0], relative_error=bound)
    assert type(sketch.relative_error) is float
    assert json.loads(json.dumps(sketch.relative_error)) == float(bound)


def test_sketches_of_the_same_values_are_equal() -> None:
    one, other = QuantileSketch.of([1.0, -3.0, 0.0]), QuantileSketch.of([0.0, 1.0, -3.0])
    assert one == other
    assert hash(one) == hash(other)
    assert one != QuantileSketch.of([1.0, -3.0])
    assert one != QuantileSketch.of([1.0, -3.0, 0.0], relative_error=0.02)
    assert one != 3


def test_buckets_may_be_lists() -> None:
    sketch = QuantileSketch(
        positive_indices=cast("Any", [1, 2]), positive_counts=cast("Any", [1, 2])
    )
    assert sketch.count == 3
    assert sketch.positive_indices.dtype == np.int64
    assert sketch.positive_counts.dtype == np.float64


@pytest.mark.parametrize(
    ("indices", "counts", "told"),
    [
        ([1], [-3.0], r"the positive counts of a sketch are \[-3.0\]; give finite numbers"),
        ([1], [math.nan], "the positive counts of a sketch are"),
        ([1], [math.inf], "the positive counts of a sketch are"),
        (
            [2, 1],
            [1, 1],
            (
                r"the positive buckets of a sketch are \[2, 1\]; give ascending integers in"
                r" -35488..35488"
            ),
        ),
        ([1, 1], [1, 1], "give ascending integers"),
        ([1.5], [1], "give ascending integers"),
        ([2**62], [1], "give ascending integers"),
        (["a"], [1], "the positive buckets of a sketch: entries are of type"),
        (None, [1], "the positive buckets of a sketch: entries are of type object"),
        ([1, 2], [1], "2 positive buckets but 1 counts"),
        ([[1]], [[1]], "give flat arrays"),
    ],
)
def test_buckets_that_are_none_are_refused(indices: Any, counts: Any, told: str) -> None:
    with pytest.raises(MetricsError, match=told):
        QuantileSketch(positive_indices=indices, positive_counts=counts)


@pytest.mark.parametrize("error", [1e-12, 1e-6, 0.01, 0.9])
def test_every_float_has_a_bucket_that_may_be_written(error: float) -> None:
    top, tiny = float(np.finfo(np.float64).max), float(np.finfo(np.float64).tiny)
    assert QuantileSketch.of([top, tiny, -top, -tiny], relative_error=error).count == 4
