"""What a request refuses, and how it says so."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs

GOOD: dict[str, Any] = {
    "total_lengths": [5, 6],
    "rollout_ids": [0, 1],
    "global_batch_size": 2,
    "dp_size": 1,
    "max_tokens_per_gpu": 8,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"total_lengths": [5, 0]}, ["total_lengths", "sample 1", "0", "1 such"]),
        ({"total_lengths": [5, -3]}, ["sample 1", "-3"]),
        ({"total_lengths": [5, 6.0]}, ["total_lengths[1]", "6.0"]),
        ({"total_lengths": np.array([5.0, 6.0])}, ["total_lengths[0]", "5.0"]),
        ({"total_lengths": [True, False]}, ["total_lengths[0]", "True"]),
        ({"total_lengths": [5, 2**70]}, ["total_lengths[1]", "int64"]),
        ({"total_lengths": np.array([5, 2**63], dtype=np.uint64)}, ["total_lengths[1]", "int64"]),
        ({"total_lengths": [5, 2**40]}, ["sample 1", "1099511627776"]),
        ({"total_lengths": np.ones((2, 2), dtype=int)}, ["one-dimensional", "(2, 2)"]),
        ({"total_lengths": "56"}, ["total_lengths", "str"]),
        ({"total_lengths": 5}, ["total_lengths", "int"]),
        ({"total_lengths": [5, 6, 7]}, ["3 samples", "rollout_ids has 2"]),
        ({"rollout_ids": ["a", 1]}, ["rollout_ids[0]", "'a'", "rollout_ids[1]", "1"]),
        ({"global_batch_size": 0}, ["global_batch_size", "0"]),
        ({"global_batch_size": None}, ["global_batch_size", "None"]),
        ({"global_batch_size": True}, ["global_batch_size", "True"]),
        ({"global_batch_size": [1, 1]}, ["global_batch_size", "sizes", "fixed"]),
        ({"splitter": "sizes"}, ["sizes", "list", "2"]),
        ({"splitter": "sizes", "global_batch_size": []}, ["at least one step"]),
        ({"splitter": "sizes", "global_batch_size": [1, 0]}, ["global_batch_size", "0"]),
        ({"splitter": "nonsense"}, ["splitter", "nonsense", "package.module:name"]),
        ({"splitter": "no_such_module:f"}, ["no_such_module:f", "imported"]),
        ({"splitter": "math:no_such_function"}, ["math:no_such_function", "imported"]),
        ({"splitter": "math:pi"}, ["float", "callable"]),
        ({"splitter": 7}, ["splitter", "7"]),
        ({"dp_size": 0}, ["dp_size", "0"]),
        ({"cp_size": 1.0}, ["cp_size", "1.0"]),
        ({"vpp_size": "2"}, ["vpp_size", "'2'"]),
        ({"pad_to_multiple": -1}, ["pad_to_multiple", "-1"]),
        ({"max_tokens_per_gpu": None}, ["max_tokens_per_gpu", "micro_batch_size", "neither"]),
        ({"micro_batch_size": 2}, ["max_tokens_per_gpu", "micro_batch_size", "both"]),
        ({"max_tokens_per_gpu": 0}, ["max_tokens_per_gpu", "0"]),
        ({"balance": "speed"}, ["balance", "none, tokens, flops", "speed"]),
        ({"on_oversized": "ignore"}, ["on_oversized", "alone, error, drop"]),
        ({"on_misaligned": "drop"}, ["on_misaligned", "split_then_filler, error"]),
        ({"on_trailing": "keep"}, ["on_trailing", "drop, partial_step, error"]),
        ({"rank_slack": -0.1}, ["rank_slack", "-0.1"]),
        ({"rank_slack": float("nan")}, ["rank_slack", "nan"]),
        ({"rank_slack": "much"}, ["rank_slack", "much"]),
        ({"cost": 3}, ["cost", "3"]),
        ({"micro_batch_size": 2**70, "max_tokens_per_gpu": None}, ["micro_batch_size", "71 bits"]),
        ({"global_batch_size": 2**63}, ["global_batch_size", "64 bits"]),
        ({"global_batch_size": [2**70], "splitter": "sizes"}, ["global_batch_size[0]", "int64"]),
        ({"splitter": "all"}, ["splitter", "all", "global_batch_size", "2"]),
        ({"balance": "none", "rank_slack": 0.01}, ["rank_slack", "0.01", 'balance="none"']),
        ({"balance": "none", "rank_slack": "auto"}, ["rank_slack", "auto"]),
        ({"equal_samples": True, "rank_slack": "auto"}, ["rank_slack", "equal_samples"]),
        ({"pad_to_longest": True, "rank_slack": 0.01}, ["rank_slack", "pad_to_longest"]),
        (
            {"micro_batch_size": 1, "max_tokens_per_gpu": None, "rank_slack": "auto"},
            ["rank_slack", "static"],
        ),
        (
            {"micro_batch_size": 1, "max_tokens_per_gpu": None, "on_oversized": "drop"},
            ["on_oversized", "drop", "static"],
        ),
    ],
)
def test_a_bad_request_names_what_is_wrong(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(rs.ScheduleError) as caught:
        rs.ScheduleRequest(**{**GOOD, **change})
    for word in words:
        assert word in str(caught.value)


ODD = [
    *(
        None,
        "",
        "auto",
        "all",
        0,
        -1,
        1.5,
        True,
        2**70,
        10**400,
        1j,
        b"x",
        float("nan"),
        float("inf"),
    ),
    *([], [1], [None], {}, {"a": 1}, set(), object(), lambda: None, len, np.float32(0.5)),
    *(np.int64(1), np.bool_(True), np.array(1), np.array([1, 2]), np.array([[1]]), np.zeros(0)),
    *(np.array([None, 1], dtype=object), np.array(["a"]), iter([1]), range(2), "math:pi", "x:y"),
]
"""What a caller may pass by mistake."""


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(rs.ScheduleRequest)])
def test_whatever_is_passed_only_errors_of_this_package_leave_it(name: str) -> None:
    for value in ODD:
        try:
            rs.build_dp_schedule(**{**GOOD, name: value})
        except rs.ScheduleError as error:
            assert str(error)


def test_all_problems_of_a_request_are_told_at_once() -> None:
    with pytest.raises(rs.ScheduleError) as caught:
        rs.ScheduleRequest(
            total_lengths=[5, 0],
            rollout_ids=[0.5],  # type: ignore[arg-type]
            global_batch_size=0,
            dp_size=0,
            balance="speed",  # type: ignore[arg-type]
            on_trailing="keep",  # type: ignore[arg-type]
            rank_slack=7,
            splitter="nonsense",
        )
    message = str(caught.value)
    for words in ("sample 1 has 0", "rollout_ids[0]", "dp_size", "balance", "on_trailing"):
        assert words in message
    for words in ("rank_slack", "nonsense", "neither"):
        assert words in message


def test_settings_without_effect_in_older_documents_are_left_out() -> None:
    settings = {**rs.ScheduleRequest(**GOOD).settings(), "balance": "none", "rank_slack": 0.01}
    data: dict[str, Any] = {"total_lengths": [5], "rollout_ids": [0]}
    assert rs.ScheduleRequest.from_settings(settings, **data).rank_slack == 0.0
    settings |= {"max_tokens_per_gpu": None, "micro_batch_size": 2, "on_oversized": "drop"}
    assert rs.ScheduleRequest.from_settings(settings, **data).on_oversized == "alone"
    del settings["equal_samples"]
    assert rs.ScheduleRequest.from_settings(settings, **data).equal_samples is False


def test_columns_are_copied_and_frozen() -> None:
    lengths = np.array([5, 6], dtype=np.int32)
    request = rs.ScheduleRequest(**{**GOOD, "total_lengths": lengths})
    lengths[0] = 99
    assert list(request.total_lengths) == [5, 6]
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(request.total_lengths)[0] = 1


def test_derived_limits() -> None:
    request = rs.ScheduleRequest(
        **{
            **GOOD,
            "cp_size": 2,
            "dp_size": 3,
            "vpp_size": 2,
            "microbatch_group_size_per_vp_stage": 4,
            "pad_to_multiple": 4,
        }
    )
    assert request.token_cap == 16
    assert request.alignment == 12
    assert request.padded_lengths.tolist() == [8, 8]


def test_the_pipeline_group_counts_only_with_virtual_chunks() -> None:
    assert rs.ScheduleRequest(**{**GOOD, "microbatch_group_size_per_vp_stage": 4}).alignment == 1


def test_settings_rebuild_the_request_for_a_check() -> None:
    cost = rs.TransformerCost(token_flops=3, pair_flops=2, window_pair_flops=((8, 1),))
    request = rs.ScheduleRequest(
        **{**GOOD, "cp_size": 2, "cost": cost, "rank_slack": "auto", "on_trailing": "partial_step"}
    )
    again = rs.ScheduleRequest.from_settings(
        request.settings(), total_lengths=[5, 6], rollout_ids=[0, 1]
    )
    assert {**again.settings(), "splitter": "fixed", "global_batch_size": 2} == request.settings()
    assert again.cost_model == cost


def test_a_document_cannot_name_code_to_import() -> None:
    settings = {**rs.ScheduleRequest(**GOOD).settings(), "splitter": "os:system"}
    assert (
        rs.ScheduleRequest.from_settings(settings, total_lengths=[5], rollout_ids=[0]).splitter
        == "all"
    )


@pytest.mark.parametrize(
    "cost", [{"kind": "alien", "parameters": {}}, {"kind": "quadratic", "parameters": {"cubic": 1}}]
)
def test_an_unusable_cost_in_settings_is_refused(cost: dict[str, Any]) -> None:
    settings = {**rs.ScheduleRequest(**GOOD).settings(), "cost": cost}
    with pytest.raises(rs.PlanDocumentError, match=r"settings\.cost"):
        rs.ScheduleRequest.from_settings(settings, total_lengths=[5], rollout_ids=[0])


def test_settings_that_are_missing_or_unknown_are_named_by_the_function_that_was_called() -> None:
    build: Any = rs.build_dp_schedule
    with pytest.raises(TypeError) as caught:
        build(total_lengths=[5], rollout_ids=[0], max_token=8, dp=1)
    told = "build_dp_schedule: missing global_batch_size, dp_size; unknown max_token, dp; settings"
    assert str(caught.value).startswith(told)
    assert "max_tokens_per_gpu" in str(caught.value)
