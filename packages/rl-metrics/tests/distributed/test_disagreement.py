"""Ranks that pass different settings, destinations or groups raise one error, and nobody waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_metrics import (
    Metric,
    MetricsError,
    MicroBatchMetrics,
)
from rl_metrics.selftest.processes import run_gloo_ranks
from rl_metrics.torch import (
    all_reduce_metrics,
    gather_and_reduce_log_dict,
    reduce_train_step_metrics,
)

pytestmark = pytest.mark.distributed


def _messages(work: Callable[[int], object], size: int) -> list[str]:
    """What each rank raises."""

    def caught(rank: int, _: int) -> str:
        with pytest.raises(MetricsError) as error:
            work(rank)
        return str(error.value)

    return run_gloo_ranks(caught, size, deadline_seconds=30)


def _step(
    rank: int, *, names: tuple[str, ...] = ("loss",), **settings: Any
) -> dict[str, float | None]:
    given: dict[str, Any] = {
        "aggregation": "rollout_mean",
        "step_units": 8,
        "cp_size": 1,
    } | settings
    batch = MicroBatchMetrics(sums=dict.fromkeys(names, 1.0 + rank), num_tokens=4)
    return reduce_train_step_metrics([batch], **given, group=None)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        (
            "aggregation",
            ("rollout_mean", "prompt_mean"),
            "aggregation is rollout_mean on rank 0, prompt_mean on rank 1",
        ),
        ("step_units", (8, 4), "step_units is 8.0 on rank 0, 4.0 on rank 1"),
        ("cp_size", (1, 2), "cp_size is 1 on rank 0, 2 on rank 1"),
    ],
)
def test_ranks_that_pass_different_settings_raise_the_same_error(
    name: str, values: tuple[Any, Any], told: str
) -> None:
    messages = _messages(lambda rank: _step(rank, **{name: values[rank]}), 2)
    assert (
        messages == [f"ranks of the group disagree: {told}. Pass the same values on every rank"] * 2
    )


def test_settings_are_compared_by_value_and_token_mean_needs_no_units() -> None:
    assert (
        run_gloo_ranks(lambda rank, _: _step(rank, step_units=8 if rank else 8.0), 2)
        == [{"loss": 3 / 8}] * 2
    )
    assert (
        run_gloo_ranks(lambda rank, _: _step(rank, aggregation="token_mean", step_units=rank), 2)
        == [{"loss": 3 / 8}] * 2
    )


@pytest.mark.parametrize(
    "settings", [{"step_units": 0}, {"aggregation": "mean"}, {"cp_size": 3}, {"step_units": "x"}]
)
def test_settings_that_are_wrong_on_one_rank_raise_on_all(settings: dict[str, Any]) -> None:
    first, second = _messages(lambda rank: _step(rank, **(settings if rank else {})), 2)
    assert first == f"rank 1 could not prepare its metrics: {second}"


def test_a_number_that_is_wrong_on_one_rank_raises_on_all() -> None:
    def work(rank: int) -> object:
        batch = MicroBatchMetrics(sums={"loss": torch.ones(1 + rank).squeeze()}, num_tokens=4)
        return reduce_train_step_metrics([batch], aggregation="token_mean", cp_size=1, group=None)

    first, second = _messages(work, 2)
    assert second == "micro-batch 0: 'loss' is Tensor of shape (2,); give one number"
    assert first == f"rank 1 could not prepare its metrics: {second}"


def test_a_reducer_output_and_a_metric_of_one_name_are_different_metrics() -> None:
    def work(rank: int) -> object:
        batch = MicroBatchMetrics(
            sums={"x": 1.0} if rank else {},
            num_tokens=1,
            metrics=() if rank else (Metric.of_sum("x", 1.0),),
        )
        return reduce_train_step_metrics([batch], aggregation="token_mean", cp_size=1, group=None)

    first, second = _messages(work, 2)
    assert first == second
    assert "rank 1 lacks 'x (sum)' and adds 'x (sum, reducer output)' compared with rank 0" in first


def test_ranks_that_send_the_result_to_different_ranks_raise_the_same_error() -> None:
    messages = _messages(
        lambda rank: all_reduce_metrics([Metric.of_sum("x", 1)], dst=(0, None, 1)[rank]), 3
    )
    told = (
        "ranks of the group disagree: dst is 0 on rank 0, None on rank 1, 1 on rank 2. Pass the"
        " same values on every rank"
    )
    assert messages == [told] * 3


@pytest.mark.parametrize("dst", [2, -1, 0.0, "0"])
def test_a_destination_outside_the_group_is_refused(dst: Any) -> None:
    for message in _messages(
        lambda rank: gather_and_reduce_log_dict([Metric.of_sum("x", 1)], group=None, dst=dst), 2
    ):
        assert message.startswith(f"dst is {dst!r}")
    with pytest.raises(MetricsError, match="dst is "):
        gather_and_reduce_log_dict([Metric.of_sum("x", 1)], group=None, dst=dst)


def test_a_destination_outside_a_subgroup_is_refused() -> None:
    def work(rank: int) -> object:
        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        return gather_and_reduce_log_dict(
            [Metric.of_sum("x", 1)], group=groups[rank // 2], dst=2 if rank < 2 else 0
        )

    first, second, third = _messages(work, 3)
    assert (
        first
        == second
        == "dst is 2; it is the GLOBAL rank that gets the result, so give one of [0, 1]"
    )
    assert third == "dst is 0; it is the GLOBAL rank that gets the result, so give one of [2]"


def test_a_process_outside_the_group_is_told_so() -> None:
    def work(rank: int, _: int) -> str:
        group: Any = dist.new_group([0])
        if rank == 0:
            return ""
        with pytest.raises(MetricsError) as caught:
            all_reduce_metrics([Metric.of_sum("x", 1)], group)
        return str(caught.value)

    assert (
        run_gloo_ranks(work, 2)[1]
        == "this process (global rank 1) does not belong to the group; only its members call"
    )
