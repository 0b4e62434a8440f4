"""Frozen documents of `schedule-plan.v1` and frozen digests."""

import json
from pathlib import Path
from typing import Any

import pytest

import rl_schedule as rs

HERE = Path(__file__).parent
DIGESTS: list[dict[str, Any]] = json.loads((HERE / "digests.json").read_text())


@pytest.mark.parametrize("name", ["plain", "empty", "limits"])
def test_a_frozen_document_is_read_and_written_unchanged(name: str) -> None:
    document = json.loads((HERE / "schedule-plan.v1" / f"{name}.json").read_text())
    plan = rs.SchedulePlan.from_document(document)
    again: dict[str, Any] = {**plan.to_document()}
    assert {key: again[key] for key in document if key not in {"minor", "producer"}} == {
        key: value for key, value in document.items() if key not in {"minor", "producer"}
    }
    assert document["minor"] <= again["minor"]


def test_the_plain_document_says_what_its_plan_was() -> None:
    plan = rs.SchedulePlan.from_document(
        json.loads((HERE / "schedule-plan.v1" / "plain.json").read_text())
    )
    assert plan == rs.build_dp_schedule(
        total_lengths=[7, 3, 5, 12, 2, 2, 6, 1, 4, 8, 3],
        rollout_ids=[20, 20, 21, 22, 23, 23, 24, 25, 26, 27, 28],
        global_batch_size=[3, 2, 3],
        splitter="sizes",
        dp_size=4,
        cp_size=2,
        max_tokens_per_gpu=5,
        balance="none",
    )
    assert (plan.oversized_samples, plan.dropped_rollouts, plan.global_batch_sizes) == (
        (3,),
        (28,),
        (3, 2, 3),
    )
    assert plan.filler_micro_batches == ((3, 1), (3, 2))


def test_the_document_of_limits_says_what_its_plan_was() -> None:
    document = json.loads((HERE / "schedule-plan.v1" / "limits.json").read_text())
    request = rs.ScheduleRequest(
        total_lengths=[7, 3, 5, 12, 2, 2, 6, 1, 4, 8, 3, 3],
        rollout_ids=["p1"] * 4 + ["q2"] * 4 + ["r3"] * 2 + ["s4"] * 2,
        keep_together=[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
        global_batch_size=3,
        dp_size=2,
        max_tokens_per_gpu=16,
        max_samples_per_micro_batch=4,
        cost=rs.TokenCost(),
    )
    plan = rs.SchedulePlan.from_document(document)
    assert rs.check_plan(plan, request) == []
    assert plan == rs.plan_schedule(request)
    assert plan.rollout_names == ("p1", "q2", "r3", "s4")
    assert (plan.oversized_samples, plan.dropped_rollouts) == ((2, 3), (3,))
    assert document["minor"] == 1


@pytest.mark.parametrize("case", DIGESTS, ids=range(len(DIGESTS)))
def test_a_digest_is_the_same_on_every_platform(case: dict[str, Any]) -> None:
    plan = rs.build_dp_schedule(**case["request"])
    assert rs.check_plan(plan, rs.ScheduleRequest(**case["request"])) == []
    assert plan.digest == case["digest"]
