"""The handed cases by the float64 reference: values equal for every split and layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rl_metrics import Metric, merge_metrics, response_owner
from rl_metrics.aggregation.loss_reduction import aggregate

if TYPE_CHECKING:
    from conftest import HandedStep


def test_every_handed_case_is_used(handed_cases: dict[str, dict[str, Any]]) -> None:
    others = {"declared_kind_not_guessed_from_the_name", "last_response_token_ownership"}
    assert {name for name, case in handed_cases.items() if "aggregation" not in case} == others
    assert len(handed_cases) == 13


def test_reference_gives_the_handed_value(handed_step: HandedStep) -> None:
    expected = handed_step.expect
    value = aggregate(
        handed_step.aggregation, handed_step.values, handed_step.masks, **handed_step.ids
    )
    assert value is None if expected is None else value == pytest.approx(expected, rel=1e-12)


def test_kind_is_declared_not_guessed_from_the_name(
    handed_cases: dict[str, dict[str, Any]],
) -> None:
    case = handed_cases["declared_kind_not_guessed_from_the_name"]
    records = [
        Metric.of_mean(name, value, 1.0)
        for name, values in case["metrics"].items()
        for value in values
    ]
    assert {name: metric.value for name, metric in merge_metrics(records).items()} == case["expect"]


def test_last_response_token_has_the_handed_owner(handed_cases: dict[str, dict[str, Any]]) -> None:
    case = handed_cases["last_response_token_ownership"]
    owner = response_owner(
        case["total_length"], case["response_length"], case["response_index"], case["cp_size"]
    )
    assert owner == (case["expect"]["rank"], case["expect"]["local_index"])
