"""Laws of the metric algebra.

Merging is associative and commutative, splits do not matter, wire and records agree.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_metrics import (
    Metric,
    Moments,
    QuantileSketch,
    merge_metrics,
    merge_moments,
)
from rl_metrics.metric import wire
from rl_metrics.metric.kinds import KINDS, Kind

numbers = st.floats(-1e6, 1e6, allow_subnormal=False)
lists = st.lists(numbers, max_size=8)


def record(kind: Kind, values: list[float]) -> Metric:
    """A record of one kind over some numbers; no numbers, no data."""
    if kind == "moments":
        return Metric.of_moments("x", values)
    if kind == "histogram":
        return Metric.of_histogram("x", values)
    if not values:
        return Metric.empty("x", kind)
    return {
        "sum": lambda: Metric.of_sum("x", sum(values)),
        "mean": lambda: Metric.of_mean("x", sum(values), len(values)),
        "min": lambda: Metric.of_min("x", min(values)),
        "max": lambda: Metric.of_max("x", max(values)),
        "last": lambda: Metric.of_last("x", values[-1], stamp=len(values)),
    }[kind]()


def close(a: Metric, b: Metric) -> None:
    """Equal up to rounding, no data equal to no data."""
    assert (a.name, a.kind, a.unit) == (b.name, b.kind, b.unit)
    assert a.weight == pytest.approx(b.weight)
    if not a.weight:
        return
    assert a.numerator == pytest.approx(b.numerator, rel=1e-9, abs=1e-6)
    assert a.stamp == b.stamp
    assert a.m2 == pytest.approx(b.m2, rel=1e-9, abs=1e-3)
    if a.sketch is not None:
        for name in ("zero", "nonfinite"):
            assert getattr(a.sketch, name) == getattr(b.sketch, name)
        for name in ("positive_indices", "positive_counts", "negative_indices", "negative_counts"):
            np.testing.assert_array_equal(getattr(a.sketch, name), getattr(b.sketch, name))


@given(st.sampled_from(KINDS), lists, lists, lists)
def test_merge_is_associative_and_commutative(
    kind: Kind, x: list[float], y: list[float], z: list[float]
) -> None:
    a, b, c = (record(kind, values) for values in (x, y, z))
    close(a.merge(b).merge(c), a.merge(b.merge(c)))
    close(a.merge(b), b.merge(a))


@given(st.sampled_from(KINDS), lists)
def test_a_record_without_data_is_neutral(kind: Kind, x: list[float]) -> None:
    a = record(kind, x)
    close(a.merge(Metric.empty("x", kind)), a)
    close(Metric.empty("x", kind).merge(a), a)


@given(st.sampled_from(KINDS), st.lists(lists, min_size=1, max_size=5))
def test_two_all_reduces_merge_like_one_process(kind: Kind, per_rank: list[list[float]]) -> None:
    ranks = [[record(kind, values)] for values in per_rank]
    agreed = np.max([wire.extrema(records) for records in ranks], axis=0)
    summed = np.sum([wire.sums(records, agreed) for records in ranks], axis=0)
    expected = list(merge_metrics(metric for records in ranks for metric in records).values())
    for records in ranks:
        (merged,) = wire.unpack(records, agreed, summed)
        close(merged, expected[0])


@given(
    st.lists(st.tuples(st.floats(20, 40), st.floats(1e-3, 1e-2)), min_size=2, max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_moments_over_the_wire_do_not_cancel(parts: list[tuple[float, float]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = [rng.normal(mean, deviation, int(rng.integers(1, 60))) for mean, deviation in parts]
    records = [[Metric.of_moments("x", values)] for values in data]
    agreed = np.max([wire.extrema(rank) for rank in records], axis=0)
    summed = np.sum([wire.sums(rank, agreed) for rank in records], axis=0)
    merged = wire.unpack(records[0], agreed, summed)[0].moments
    everything = np.concatenate(data)
    assert merged.mean == pytest.approx(everything.mean(), rel=1e-12)
    assert merged.variance() == pytest.approx(everything.var(), rel=1e-9)


@given(st.lists(numbers, min_size=1, max_size=50), st.integers(0, 2**32 - 1))
def test_moments_do_not_depend_on_the_split(values: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    part = rng.integers(0, 4, len(values))
    merged = merge_moments(Moments.of(np.array(values)[part == k]) for k in range(4))
    assert merged.count == len(values)
    assert merged.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    assert merged.m2 == pytest.approx(np.var(values) * len(values), rel=1e-9, abs=1e-6)


@given(
    st.lists(
        st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False),
        min_size=1,
        max_size=60,
    ),
    st.floats(0, 1),
    st.sampled_from([0.001, 0.01, 0.2]),
)
def test_a_quantile_is_within_the_stated_relative_error(
    values: list[float], q: float, bound: float
) -> None:
    exact = np.sort(values)[math.floor(q * (len(values) - 1) + 1e-9 * len(values))]
    estimate = QuantileSketch.of(values, relative_error=bound).quantile(q)
    assert estimate is not None
    assert abs(estimate - exact) <= bound * abs(exact) * (1 + 1e-6)


@given(st.lists(st.lists(numbers, max_size=20), min_size=1, max_size=5), st.floats(0, 1))
def test_merged_sketches_equal_the_sketch_of_everything(parts: list[list[float]], q: float) -> None:
    merged = QuantileSketch()
    for part in parts:
        merged = merged.merge(QuantileSketch.of(part))
    assert merged.quantile(q) == QuantileSketch.of([x for part in parts for x in part]).quantile(q)


@given(
    st.lists(
        st.lists(st.sampled_from([1.0, -2.0, math.inf, -math.inf, math.nan, 1e300]), max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_infinities_travel_as_they_merge(per_rank: list[list[float]]) -> None:
    ranks = [[Metric.of_moments("x", values)] for values in per_rank]
    agreed = np.max([wire.extrema(records) for records in ranks], axis=0)
    with np.errstate(invalid="ignore"):
        summed = np.sum([wire.sums(records, agreed) for records in ranks], axis=0)
    (merged,) = wire.unpack(ranks[0], agreed, summed)
    whole = merge_moments(Moments.of(values) for values in per_rank)
    assert merged.moments.mean == pytest.approx(whole.mean, rel=1e-12, nan_ok=True)
    assert merged.m2 == pytest.approx(whole.m2, rel=1e-12, nan_ok=True)
