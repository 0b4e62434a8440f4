"""The self-test's random step holds what it promises."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl_metrics import AGGREGATIONS, Aggregation, ContextParallel, MetricsError, response_slice
from rl_metrics.selftest.scenario import make_scenario


@pytest.mark.parametrize("seed", range(20))
def test_a_step_contains_what_usually_goes_wrong(seed: int) -> None:
    step = make_scenario(seed)
    assert 1 in step.response_lengths
    counts = np.unique(step.rollout_ids, return_counts=True)[1]
    assert counts.max() == 3, "fan-out"
    sums = [int(mask.sum()) for mask in step.loss_masks]
    masked = [i for i, total in enumerate(sums) if not total]
    assert {step.rollout_ids[i] for i in masked} == {step.rollout_ids[-1]}, (
        "exactly one rollout is masked throughout"
    )
    assert any(0 < total < len(mask) for total, mask in zip(sums, step.loss_masks, strict=True)), (
        "holes"
    )
    shapes = zip(step.total_lengths, step.response_lengths, strict=True)
    assert any(
        not len(response_slice(*shape, ContextParallel(2, rank)))
        for shape in shapes
        for rank in range(2)
    ), "empty slices"


def test_random_starts_give_different_steps_and_the_same_start_the_same() -> None:
    assert make_scenario(0).expected_value("token_mean") != make_scenario(1).expected_value(
        "token_mean"
    )
    assert make_scenario(3).expected_value("token_mean") == make_scenario(3).expected_value(
        "token_mean"
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_closed_form_gradient_is_the_slope_of_the_value(aggregation: Aggregation) -> None:
    step = make_scenario(5)
    for k in range(2):
        nudged = []
        for nudge in (1e-6, -1e-6):
            first, second = step.parameters
            parameters = (first + nudge, second) if k == 0 else (first, second + nudge)
            nudged.append(replace(step, parameters=parameters).expected_value(aggregation))
        assert (nudged[0] - nudged[1]) / 2e-6 == pytest.approx(
            step.expected_gradient(aggregation)[k], rel=1e-6
        )


def test_too_small_a_step_is_refused() -> None:
    with pytest.raises(MetricsError, match="num_rollouts is 3; give an integer of at least 4"):
        make_scenario(0, num_rollouts=3)


def test_a_step_counts_its_trained_tokens_and_needs_some() -> None:
    step = make_scenario(2)
    assert step.num_tokens == sum(int(mask.sum()) for mask in step.loss_masks)
    masked = replace(step, loss_masks=tuple(np.zeros_like(mask) for mask in step.loss_masks))
    with pytest.raises(MetricsError, match="no trained token"):
        masked.expected_value("token_mean")


@pytest.mark.parametrize("seed", [-1, 1.5, "0"])
def test_a_seed_is_an_integer_of_at_least_0(seed: Any) -> None:
    with pytest.raises(MetricsError, match="seed is"):
        make_scenario(seed)
