"""The public names are a promise: a change here is a change of the package."""

import inspect

import rl_schedule as rs

NAMES = [
    "CostModel",
    "Filler",
    "InfeasibleScheduleError",
    "PlanDocumentError",
    "PrefixCost",
    "PrefixMicroBatch",
    "PrefixPlan",
    "PrefixRequest",
    "PrefixStepStats",
    "Problem",
    "QuadraticCost",
    "RankView",
    "SamplePlacement",
    "ScheduleError",
    "SchedulePlan",
    "ScheduleRequest",
    "ScheduleStats",
    "StepSplitter",
    "StepStats",
    "TokenCost",
    "TransformerCost",
    "UnsupportedContractError",
    "best_fit_decreasing",
    "build_dp_schedule",
    "build_filler",
    "check_plan",
    "check_prefix_plan",
    "compute_dynamic_global_batch_size",
    "first_fit",
    "first_fit_decreasing",
    "karmarkar_karp",
    "plan_schedule",
    "plan_with_prefixes",
    "restore_order",
]


def test_public_names_are_pinned() -> None:
    assert rs.__all__ == NAMES
    assert all(hasattr(rs, name) for name in NAMES)


def test_build_takes_exactly_the_fields_of_a_request_by_keyword() -> None:
    parameters = inspect.signature(rs.build_dp_schedule).parameters
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    fields = inspect.signature(rs.ScheduleRequest).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        name: p.default for name, p in fields.items()
    }


def test_every_public_name_is_documented() -> None:
    assert [name for name in NAMES if not inspect.getdoc(getattr(rs, name))] == []
