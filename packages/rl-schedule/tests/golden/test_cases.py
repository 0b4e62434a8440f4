"""Inputs that broke other schedulers, each with what must hold; data in `schedule-cases.json`."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "schedule-cases.json").read_text()
)["cases"]


def _request(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key not in {"name", "expect"}}


def _steps_of_rollouts(plan: rs.SchedulePlan, rollout_ids: list[int]) -> list[list[int]]:
    """Rollout ids of each step, in first-occurrence order of the batch."""
    ends = np.cumsum([0, *plan.num_microbatches])
    steps: list[list[int]] = []
    for start, end in pairwise(ends.tolist()):
        positions = sorted(
            int(i)
            for rank in range(plan.dp_size)
            for number in range(start, end)
            for i in plan.micro_batch_samples(rank, number)
        )
        steps.append(list(dict.fromkeys(rollout_ids[i] for i in positions)))
    return steps


@pytest.mark.parametrize(
    "case", [c for c in CASES if "error_mentions" in c["expect"]], ids=lambda c: c["name"]
)
def test_bad_input_is_refused_with_the_numbers_that_matter(case: dict[str, Any]) -> None:
    with pytest.raises(rs.ScheduleError) as caught:
        rs.build_dp_schedule(**_request(case))
    for word in case["expect"]["error_mentions"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "case", [c for c in CASES if "error_mentions" not in c["expect"]], ids=lambda c: c["name"]
)
def test_case_gives_the_stated_plan(case: dict[str, Any]) -> None:
    plan = rs.build_dp_schedule(**_request(case))
    lengths = np.array(case["total_lengths"])
    found: dict[str, object] = {
        "num_microbatches": list(plan.num_microbatches),
        "global_batch_sizes": list(plan.global_batch_sizes),
        "fillers": len(plan.filler_micro_batches),
        "oversized_samples": list(plan.oversized_samples),
        "dropped_samples": list(plan.dropped_samples),
        "dropped_rollouts": list(plan.dropped_rollouts),
        "max_micro_batch_tokens": max(
            int(lengths[plan.micro_batch_samples(rank, number)].sum())
            for rank in range(plan.dp_size)
            for number in range(plan.micro_batches_per_rank)
        ),
        "steps_of_rollouts": _steps_of_rollouts(plan, case["rollout_ids"]),
    }
    assert {key: found[key] for key in case["expect"]} == case["expect"]
    assert rs.check_plan(plan, rs.ScheduleRequest(**_request(case))) == []
