"""One step on every (dp, cp) of up to 4 gloo processes and both layouts.

Reports, rollout log and gradients do not change.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rl_metrics import AGGREGATIONS, Aggregation, MetricsError, megatron_loss_scale
from rl_metrics.selftest import layout_checks
from rl_metrics.selftest.scenario import make_scenario
from rl_metrics.torch import loss_reducer
from rl_metrics.torch.reducers import LossReducer

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("seed", [0, 1])
def test_values_and_gradients_are_those_of_the_closed_form(seed: int) -> None:
    checks = layout_checks.check_layouts(max_processes=4, seed=seed)
    covered = {
        (check.dp_size, check.cp_size, check.layout, check.dtype, check.aggregation)
        for check in checks
    }
    meshes = {(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)}
    kinds = {
        (layout, dtype) for layout in ("zigzag", "contiguous") for dtype in ("float32", "float64")
    }
    assert covered == {
        (*mesh, *kind, aggregation)
        for mesh in meshes
        for kind in kinds
        for aggregation in AGGREGATIONS
    }
    for dtype, bound in (("float32", 1e-6), ("float64", 1e-14)):
        mine = [check for check in checks if check.dtype == dtype]
        value, gradient = (
            max(check.value_difference for check in mine),
            max(check.gradient_difference for check in mine),
        )
        print(
            f"seed {seed} {dtype}: largest relative difference of values {value:.1e}, of gradients"
            f" {gradient:.1e}"
        )
        assert max(value, gradient) <= bound
    assert all(check.passes for check in checks)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("scale without the context-parallel ranks", lambda scale, cp_size: scale / cp_size),
        ("scale with the context-parallel ranks twice", lambda scale, cp_size: scale * cp_size),
    ],
)
def test_a_wrong_factor_is_found_on_every_mesh_with_context_parallelism(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[[float, int], float]
) -> None:
    monkeypatch.setattr(
        layout_checks,
        "megatron_loss_scale",
        lambda aggregation, **sizes: wrong(
            megatron_loss_scale(aggregation, **sizes), sizes["cp_size"]
        ),
    )
    checks = layout_checks.check_layouts(max_processes=2)
    assert {check.cp_size for check in checks if not check.passes} == {2}, name
    assert all(not check.passes for check in checks if check.cp_size == 2), name


def test_denominators_of_a_micro_batch_instead_of_the_step_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each sample divided by its own mask sum: right for sample_mean, wrong wherever a rollout or a
    # group has siblings elsewhere.
    def of_micro_batch(aggregation: Aggregation, *arguments: Any, **settings: Any) -> LossReducer:
        own: Aggregation = (
            "sample_mean" if aggregation in ("rollout_mean", "prompt_mean") else aggregation
        )
        return loss_reducer(own, *arguments, **(settings | {"denominators": None}))

    monkeypatch.setattr(layout_checks, "loss_reducer", of_micro_batch)
    failed = {
        check.aggregation
        for check in layout_checks.check_layouts(max_processes=2)
        if not check.passes
    }
    assert failed == {"rollout_mean", "prompt_mean"}


def test_a_mesh_of_one_rank_in_this_process(world_of_one: None) -> None:
    checks = layout_checks._check_mesh(make_scenario(3), 1, 1, 0, 1)
    assert len(checks) == 20
    assert all(check.passes for check in checks)


def test_a_report_without_data_and_a_wrong_restoration_do_not_pass() -> None:
    assert layout_checks._relative(None, 1.0) == math.inf
    check, *_ = layout_checks.check_layouts(max_processes=1)
    assert check.passes
    assert not replace(check, gather_is_exact=False).passes
    assert not replace(check, value_difference=math.nan).passes
    assert not replace(check, gradient_difference=math.nan).passes
    assert not replace(check, whitening_difference=math.nan).passes


@pytest.mark.parametrize(
    "settings",
    [
        {"max_processes": 0},
        {"max_processes": 1.5},
        {"deadline_seconds": 0},
        {"deadline_seconds": math.nan},
    ],
)
def test_settings_that_run_nothing_are_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(MetricsError, match=name):
        layout_checks.check_layouts(**settings)


def test_each_mesh_is_announced_before_it_runs() -> None:
    lines: list[str] = []
    layout_checks.check_layouts(max_processes=2, announce=lines.append)
    assert [line.split(",")[0] for line in lines] == [
        "mesh 1 of 3: dp 1 x cp 1",
        "mesh 2 of 3: dp 1 x cp 2",
        "mesh 3 of 3: dp 2 x cp 1",
    ]
