"""Divisors of a step whose samples lie on many ranks, over real gloo processes."""

from typing import Any

import numpy as np
import pytest
import torch

from rl_metrics import (
    AGGREGATIONS,
    MetricsError,
    count_step_units,
    loss_denominators,
    report,
    rollout_metric,
    rollout_shares,
)
from rl_metrics.selftest.processes import run_gloo_ranks
from rl_metrics.selftest.scenario import CONSTANT, make_scenario
from rl_metrics.torch import StepDivisors, all_reduce_metrics, step_divisors

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("as_text", [False, True])
def test_every_rank_gets_what_one_process_would_compute(size: int, as_text: bool) -> None:
    scenario = make_scenario(1)
    masks: Any = scenario.loss_masks
    ids: dict[str, Any] = {"rollout_ids": scenario.rollout_ids, "group_ids": scenario.group_ids}
    if as_text:
        ids = {name: [f"uid-{i}" for i in column] for name, column in ids.items()}

    def work(rank: int, _: int) -> list[StepDivisors]:
        # The last rank has none when there are three.
        mine = range(rank, len(masks), min(size, 2)) if rank < 2 else []
        own = {name: [column[i] for i in mine] for name, column in ids.items()}
        return [
            step_divisors(name, [masks[i] for i in mine], **own, constant=CONSTANT, group=None)
            for name in AGGREGATIONS
        ]

    for rank, found in enumerate(run_gloo_ranks(work, size)):
        mine = list(range(rank, len(masks), min(size, 2))) if rank < 2 else []
        for name, step in zip(AGGREGATIONS, found, strict=True):
            whole = loss_denominators(name, masks, **ids)
            assert step.denominators.tolist() == whole[mine].tolist()
            assert step.step_units == count_step_units(name, masks, **ids, constant=CONSTANT)
            assert step.rollout_shares is not None
            assert step.rollout_shares.tolist() == rollout_shares(ids["rollout_ids"])[mine].tolist()


def test_the_worked_example_and_rewards_of_rollouts_over_ranks() -> None:
    masks = [torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([[1, 1], [1, 0]])]
    ids = [["a", "a"], ["a", "b"]]
    rewards = [[1.0, 1.0], [1.0, 4.0]]

    def work(rank: int, _: int) -> tuple[list[float], float, dict[str, float | None]]:
        step = step_divisors("rollout_mean", masks[rank], rollout_ids=ids[rank], group=None)
        assert step.rollout_shares is not None
        metrics = [
            rollout_metric("reward", rewards[rank], step.rollout_shares, kind=kind)
            if kind == "mean"
            else rollout_metric(f"reward_{kind}", rewards[rank], step.rollout_shares, kind=kind)
            for kind in ("mean", "sum", "max", "histogram")
        ]
        return step.denominators.tolist(), step.step_units, report(all_reduce_metrics(metrics))

    (first, units, lines), (second, same_units, same_lines) = run_gloo_ranks(work, 2)
    assert (first, second) == ([6.0, 6.0], [6.0, 1.0])
    assert units == same_units == 2.0
    assert lines == same_lines
    assert lines == {
        "reward": pytest.approx(2.5, rel=1e-12),
        "reward_sum": pytest.approx(5.0, rel=1e-12),
        "reward_max": 4.0,
        "reward_histogram_p50": 1.0,
        "reward_histogram_p90": 1.0,
        "reward_histogram_p99": 1.0,
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"loss_masks": [[1, 2]]}, "rank 1 could not prepare .*: sample 0: loss mask holds 2 at"),
        ({"rollout_ids": ["a", "b"]}, "1 loss masks but rollout_ids of shape"),
        ({"rollout_ids": None}, "rollout_mean needs rollout_ids"),
        ({"aggregation": "sample_mean"}, "aggregation is rollout_mean on rank 0, sample_mean on"),
        ({"group_ids": ["g"]}, "group_ids is missing on rank 0, given on rank 1"),
        ({"rollout_ids": [7]}, r"rollout_ids must be all .* rollout_ids\[0\] is 'a' and"),
        ({"loss_masks": None}, "rank 1 could not prepare .*: loss_masks, one per sample: got None"),
    ],
)
def test_a_rank_that_is_wrong_or_differs_is_told_to_all(
    other: dict[str, Any], message: str
) -> None:
    given = {"aggregation": "rollout_mean", "loss_masks": [[1, 1]], "rollout_ids": ["a"]}

    def work(rank: int, _: int) -> None:
        settings: dict[str, Any] = given | other if rank else given
        if rank == 0:
            with pytest.raises(MetricsError, match=message):
                step_divisors(**settings, group=None)
        else:
            with pytest.raises(MetricsError):
                step_divisors(**settings, group=None)

    run_gloo_ranks(work, 2, deadline_seconds=30)


def test_a_single_process_needs_no_group() -> None:
    step = step_divisors("token_mean", np.array([[1, 0], [1, 1]]), group=None)  # type: ignore[arg-type]
    assert (step.denominators.tolist(), step.step_units) == ([1.0, 1.0], 3.0)
    assert step.rollout_shares is None
    with pytest.raises(MetricsError, match="constant needs a positive number"):
        step_divisors("constant", [[1]], group=None)
    with pytest.raises(MetricsError, match="unknown loss aggregation"):
        step_divisors("mean", [[1]], group=None)  # type: ignore[arg-type]
