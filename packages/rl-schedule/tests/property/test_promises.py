"""P1-P10 on random requests, judged by `check_plan`, which recomputes all from the request."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import rl_schedule as rs


@st.composite
def requests(draw: st.DrawFn) -> rs.ScheduleRequest:
    """Any request whose policies allow its data."""
    count = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    ids = draw(st.lists(st.integers(-3, 12), min_size=count, max_size=count))
    static = draw(st.booleans())
    splitter = draw(st.sampled_from(["fixed", "all"]))
    balance: Any = draw(st.sampled_from(["none", "tokens", "flops"]))
    size = draw(st.integers(1, len(set(ids))))
    return rs.ScheduleRequest(
        total_lengths=lengths,
        rollout_ids=ids,
        global_batch_size=None if splitter == "all" else size,
        dp_size=draw(st.integers(1, 6)),
        cp_size=draw(st.integers(1, 3)),
        vpp_size=draw(st.integers(1, 2)),
        microbatch_group_size_per_vp_stage=draw(st.integers(1, 3)),
        max_tokens_per_gpu=None if static else draw(st.integers(1, 80)),
        micro_batch_size=draw(st.integers(1, 5)) if static else None,
        balance=balance,
        rank_slack=0.0
        if static or balance == "none"
        else draw(st.sampled_from([0.0, 0.01, "auto"])),
        splitter=splitter,
        on_oversized="alone" if static else draw(st.sampled_from(["alone", "drop"])),
        on_trailing="partial_step",
        pad_to_multiple=draw(st.sampled_from([1, 1, 4])),
    )


@given(requests())
def test_every_promise_holds(request: rs.ScheduleRequest) -> None:
    assert rs.check_plan(rs.plan_schedule(request), request) == []


@given(requests())
def test_equal_requests_give_equal_digests(request: rs.ScheduleRequest) -> None:
    assert rs.plan_schedule(request).digest == rs.plan_schedule(request).digest


@given(requests())
def test_document_round_trip_is_exact(request: rs.ScheduleRequest) -> None:
    plan = rs.plan_schedule(request)
    document = json.loads(json.dumps(plan.to_document()))
    again = rs.SchedulePlan.from_document(document)
    assert again == plan
    assert again.stats == plan.stats
    assert again.to_document() == document
