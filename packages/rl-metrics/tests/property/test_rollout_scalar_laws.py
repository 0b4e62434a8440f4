"""A number of a rollout counts once, wherever the rollout's samples are."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_metrics import (
    Metric,
    MetricsError,
    QuantileSketch,
    merge_metrics,
    rollout_metric,
    rollout_shares,
)
from rl_metrics.metric.kinds import Kind

KINDS: list[Kind] = ["sum", "mean", "min", "max", "moments", "histogram"]


def _of_rollouts(kind: Kind, values: list[float]) -> Metric:
    """The same metric of one number per rollout."""
    if kind == "moments":
        return Metric.of_moments("x", values, unit="rollout")
    if kind == "histogram":
        return Metric.of_histogram("x", values, unit="rollout")
    numerator = {"min": min, "max": max}.get(kind, sum)(values)
    return Metric(
        name="x", kind=kind, numerator=numerator, weight=float(len(values)), unit="rollout"
    )


@pytest.mark.parametrize("kind", KINDS)
@given(
    rollouts=st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 7)), min_size=1, max_size=6),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_on_any_rank_report_like_one_number_per_rollout(
    kind: Kind, rollouts: list[tuple[float, int]], num_ranks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.permutation([r for r, (_, siblings) in enumerate(rollouts) for _ in range(siblings)])
    values = np.array([rollouts[r][0] for r in ids])
    shares = rollout_shares(ids)
    rank = rng.integers(0, num_ranks, ids.size)
    merged = merge_metrics(
        rollout_metric("x", values[rank == k], shares[rank == k], kind=kind)
        for k in range(num_ranks)
    )["x"]
    expected = _of_rollouts(kind, [value for value, _ in rollouts])
    assert merged.weight == pytest.approx(len(rollouts), rel=1e-12)
    for name, value in expected.report().items():
        assert merged.report()[name] == pytest.approx(value, rel=1e-9, abs=1e-7)


def test_worked_numbers() -> None:
    shares = rollout_shares(["a", "a", "b"])
    assert shares.tolist() == [0.5, 0.5, 1.0]
    assert rollout_shares([]).tolist() == []
    rewards = [1.0, 1.0, 4.0]
    assert rollout_metric("reward", rewards, shares).report() == {"reward": 2.5}
    assert rollout_metric("reward", rewards, shares, kind="sum").value == 5.0
    # Without shares the rollout of two samples would count twice: 2.0.
    assert Metric.of_mean("reward", sum(rewards), 3).value == 2.0
    # Deviations of 1 and 4 from 2.5.
    assert rollout_metric("r", rewards, shares, kind="moments").report() == {
        "r_mean": 2.5,
        "r_std": 1.5,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_samples_has_no_data_and_the_same_record(kind: Kind) -> None:
    empty = rollout_metric("x", [], [], kind=kind)
    assert empty.value is None
    assert empty.describe() == rollout_metric("x", [1.0], [1.0], kind=kind).describe()


def test_siblings_that_differ_count_by_their_mean() -> None:
    assert rollout_metric("x", [1.0, 3.0, 4.0], rollout_shares([0, 0, 1])).value == 3.0


def test_values_that_are_not_finite_reach_the_report() -> None:
    shares = rollout_shares([0, 1])
    assert rollout_metric("x", [math.inf, 1.0], shares).value == math.inf
    for kind in KINDS:
        lines = rollout_metric("x", [math.nan, 1.0], shares, kind=kind).report()
        assert all(value is not None and math.isnan(value) for value in lines.values()), kind


@pytest.mark.parametrize(
    ("values", "shares", "settings", "message"),
    [
        ([1.0], [0.5, 0.5], {}, r"metric 'x': values of shape \(1,\) and shares of shape \(2,\)"),
        ([[1.0]], [[1.0]], {}, "give one of each per sample"),
        ([1.0], [0.0], {}, r"metric 'x': shares lie in \(0, 1\]"),
        ([1.0], [2.0], {}, r"shares lie in \(0, 1\]"),
        ([1.0], [math.nan], {}, r"shares lie in \(0, 1\]"),
        (["a"], [1.0], {}, "metric 'x': the values: entries are of type"),
        ([1.0], [1.0], {"kind": "last"}, "metric 'x': kind is 'last'; use one of sum, mean"),
    ],
)
def test_what_is_no_number_of_a_rollout_is_refused(
    values: Any, shares: Any, settings: Any, message: str
) -> None:
    with pytest.raises(MetricsError, match=message):
        rollout_metric("x", values, shares, **settings)


def test_weights_of_a_sketch_are_positive_numbers_one_for_each_value() -> None:
    sketch = QuantileSketch.of([1.0, 2.0, 9.0], [1, 1, 0], weights=[3.0, 1.0, -1.0])
    assert (sketch.count, sketch.bounds) == (4.0, (1.0, 2.0))
    assert sketch.quantile(0.6) == pytest.approx(1.0, rel=0.01)
    for weights in ([1.0], [1.0, 0.0, 1.0], [1.0, math.nan, 1.0], [1.0, math.inf, 1.0]):
        with pytest.raises(MetricsError, match="give a positive number for each"):
            QuantileSketch.of([1.0, 2.0, 3.0], weights=weights)
