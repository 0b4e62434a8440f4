"""A group of one process: the same records, the same errors, without a second process."""

from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl_metrics import KeyAgreementError, Metric, MetricsError, merge_metrics, report
from rl_metrics.metric.agreement import RankReport
from rl_metrics.torch import (
    all_reduce_metrics,
    collectives,
    groups,
)


@pytest.fixture
def exchange_in_one_process(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process reduce over a real gloo group of its own, as ranks of larger groups do."""
    monkeypatch.setattr(collectives, "is_alone", lambda group: False)


@pytest.mark.usefixtures("exchange_in_one_process")
def test_a_group_of_one_exchanges_to_the_same_records() -> None:
    metrics = [
        Metric.of_sum("tokens", 3),
        Metric.of_mean("loss", 2.0, 4),
        Metric.of_min("least", -1.0),
        Metric.of_moments("advantage", [1.0, 2.0, 4.0]),
        Metric.of_histogram("length", [1.0, 10.0]),
        Metric.of_last("lr", 0.1, stamp=1),
        Metric.empty("kl", "mean"),
    ]
    expected = report(merge_metrics(metrics).values())
    for dst in (None, 0):
        result = report(all_reduce_metrics(metrics, dst=dst).values())
        assert {name: repr(value) for name, value in result.items()} == {
            name: repr(value) for name, value in expected.items()
        }
    extrema = {f"m{i}": float(i) for i in range(300)}
    assert report(
        all_reduce_metrics([Metric.of_max(*item) for item in extrema.items()]).values()
    ) == dict(sorted(extrema.items()))
    assert all_reduce_metrics([]) == {}


@pytest.mark.usefixtures("exchange_in_one_process")
def test_a_failure_in_a_group_of_one_is_raised_after_the_exchange() -> None:
    with pytest.raises(MetricsError, match="x: got int, whose way to merge is not declared"):
        all_reduce_metrics(cast("Any", {"x": 3}))


@pytest.mark.usefixtures("exchange_in_one_process")
def test_a_disagreement_is_raised_from_the_exchanged_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports = [
        RankReport(failure=None, settings={"dst": "None"}, metrics=("x (sum)",)),
        RankReport(failure=None, settings={"dst": "None"}, metrics=()),
    ]

    def exchange(gathered: list[Any], mine: RankReport, group: Any) -> None:
        assert mine == reports[0]
        gathered[:] = reports

    monkeypatch.setattr(dist, "all_gather_object", exchange)
    monkeypatch.setattr(
        collectives, "_reduce", lambda values, op, group: np.arange(values.size, dtype=np.float64)
    )
    with pytest.raises(KeyAgreementError, match=r"rank 1 lacks 'x \(sum\)' compared with rank 0"):
        all_reduce_metrics([Metric.of_sum("x", 1)])


def test_the_group_helpers_in_this_process(world_of_one: None) -> None:
    assert (groups.group_size(None), groups.group_rank(None), groups.group_members(None)) == (
        1,
        0,
        [0],
    )
    assert groups.collective_device(None) == torch.device("cpu")
