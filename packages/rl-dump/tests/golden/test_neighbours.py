"""The schedule plan of rl-schedule, as vendored here: what a join takes of it, and refuses."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rl_dump import DumpError, UnsupportedContractError
from rl_dump.tools.plan_drops import plan_drops

FOLDER = Path(__file__).parent / "schedule-plan.v1"
CAP = "the 10 tokens that a micro-batch may hold"


@pytest.fixture
def plan() -> dict[str, Any]:
    """Read a plan of 11 samples with a cap of 5 tokens on each of 2 ranks.

    3 is too long, 10 fills no step.
    """
    document: dict[str, Any] = json.loads((FOLDER / "plain.json").read_text())
    return document


def reasons(plan: dict[str, Any], rollouts: dict[int, int] | None = None) -> dict[int, str]:
    return plan_drops(plan, rollouts or {}, where="x.parquet: schedule")


def of_steps(plan: dict[str, Any], size: object) -> dict[str, Any]:
    return {**plan, "settings": {**plan["settings"], "global_batch_size": size}}


def dropping(plan: dict[str, Any], *positions: int) -> dict[str, Any]:
    """Return the plan if too long samples were dropped, and these samples were."""
    changed = copy.deepcopy(plan)
    changed["settings"]["on_oversized"] = "drop"
    changed["arrays"]["dropped_samples"]["data"] = list(positions)
    return changed


def test_a_rollout_that_fills_no_step_is_said_to(plan: dict[str, Any]) -> None:
    assert reasons(plan) == {10: "dropped by the schedule: its rollout does not fill a step"}
    assert reasons(of_steps(plan, 8)) == {
        10: "dropped by the schedule: its rollout does not fill a step of 8 rollouts"
    }


def test_a_sample_that_is_too_long_and_its_siblings_are_said_to_be(plan: dict[str, Any]) -> None:
    found = reasons(dropping(plan, 3, 4, 10), {3: 70, 4: 70, 10: 71})
    assert found == {
        3: f"dropped by the schedule: longer than {CAP}",
        4: f"dropped by the schedule: a sample of its rollout is longer than {CAP}",
        10: "dropped by the schedule: its rollout does not fill a step",
    }


def test_a_too_long_sample_that_had_its_own_micro_batch_is_not_a_reason(
    plan: dict[str, Any],
) -> None:
    plan["arrays"]["dropped_samples"]["data"] = [3]
    assert reasons(plan) == {3: "dropped by the schedule: its rollout does not fill a step"}


def test_a_plan_without_samples_drops_none() -> None:
    assert reasons(json.loads((FOLDER / "empty.json").read_text())) == {}


def test_another_major_is_refused_naming_both_and_a_newer_minor_is_read(
    plan: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rl_dump"):
        assert list(reasons({**plan, "minor": 7, "key_of_the_future": 1})) == [10]
    assert "schedule-plan.v1: minor 7 is newer than 1" in caplog.text
    with pytest.raises(
        UnsupportedContractError,
        match=r"x\.parquet: schedule: .*'other\.v9'.*'schedule-plan\.v1'",
    ):
        reasons({**plan, "contract": "other.v9"})


@pytest.mark.parametrize(
    "broken",
    [
        {"arrays": {}},
        {"arrays": None},
        {"arrays": {"dropped_samples": {"data": ["x"]}}},
        {"settings": {"cp_size": "two"}},
        {"settings": 3},
    ],
)
def test_a_document_that_lacks_what_is_needed_is_refused(
    plan: dict[str, Any], broken: dict[str, Any]
) -> None:
    with pytest.raises(DumpError, match=r"schedule-plan\.v1: cannot read what it drops"):
        reasons({**plan, **broken})
