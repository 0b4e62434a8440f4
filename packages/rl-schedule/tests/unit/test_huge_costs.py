"""Costs that are finite while their sum leaves float64: planned by their ratios, or refused."""

from typing import Any

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.cost import integer_costs, mean_cost
from rl_schedule.study.simulation import ClusterTiming, simulate_plan

LONG = [5, 9, 4, 7]


def huge(settings: dict[str, Any]) -> rs.ScheduleRequest:
    return rs.ScheduleRequest(
        total_lengths=LONG,
        rollout_ids=range(4),
        max_tokens_per_gpu=10,
        **{"dp_size": 4, "global_batch_size": 4, **settings},
    )


@pytest.mark.parametrize("limits", [{}, {"equal_samples": True}])
@pytest.mark.parametrize(
    ("costs", "plain"),
    [
        ({"sample_costs": [1e308] * 4}, {"sample_costs": [1.0] * 4}),
        ({"cost": lambda lengths: lengths * 1e307}, {"cost": rs.TokenCost()}),
    ],
)
def test_costs_whose_sum_is_beyond_float64_give_the_plan_of_their_ratios(
    costs: dict[str, Any], plain: dict[str, Any], limits: dict[str, Any]
) -> None:
    request = huge({**costs, **limits})
    plan = rs.plan_schedule(request)
    assert plan == rs.plan_schedule(huge({**plain, **limits}))
    assert np.isfinite(plan.stats.rank_imbalance)
    assert rs.check_plan(plan, request) == []


def test_steps_of_huge_costs_have_finite_figures() -> None:
    request = huge({"sample_costs": [1.5e308] * 4, "global_batch_size": 2, "dp_size": 1})
    with pytest.raises(rs.ScheduleError, match="larger unit"):
        rs.plan_schedule(request)
    stats = rs.plan_schedule(
        huge({"sample_costs": [1.5e308] * 4, "global_batch_size": 2, "dp_size": 2})
    ).stats
    assert (stats.rank_imbalance, stats.slot_imbalance) == (1.0, 1.0)


def test_huge_costs_of_both_kinds_are_refused_together() -> None:
    request = huge({"sample_costs": [1e308] * 4, "cost": lambda lengths: lengths * 1e307})
    with pytest.raises(rs.ScheduleError, match="sample 1: its sample_costs"):
        rs.plan_schedule(request)


def test_huge_costs_of_shared_prefixes_are_refused() -> None:
    request = rs.PrefixRequest(
        schedule=huge({"cost": lambda lengths: lengths * 1.5e307, "dp_size": 1}),
        prefix_ids=[0, 0, 1, 1],
        prefix_lengths=[3, 3, 2, 2],
    )
    with pytest.raises(rs.ScheduleError, match="larger unit"):
        rs.plan_with_prefixes(request)


def test_the_mean_of_costs_is_exact_in_any_order() -> None:
    costs = np.array([1e16, 1.0, 1.0, 1e308])
    assert mean_cost(costs, parts=2) == mean_cost(costs[::-1], parts=2)
    assert mean_cost(np.full(4, 1e308), parts=4) == 1e308
    unit = 2.0**1022
    assert (
        integer_costs(np.array([unit, 3 * unit, 3 * unit]), terms=8).tolist()
        == integer_costs(np.array([1.0, 3.0, 3.0]), terms=8).tolist()
    )


def test_times_beyond_float64_are_refused() -> None:
    request = huge({"sample_costs": [1e308] * 4})
    plan = rs.plan_schedule(request)
    with pytest.raises(rs.ScheduleError, match=r"a micro-batch costs 1e\+308"):
        simulate_plan(
            plan, request.padded_lengths, lambda n: np.full(n.shape, 1e308), ClusterTiming()
        )
