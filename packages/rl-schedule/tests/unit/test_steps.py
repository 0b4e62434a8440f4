"""Grouping by rollout and cutting into steps."""

import logging
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.steps import group_rollouts


def by_halves(
    *, rollout_samples: Any, rollout_tokens: Any, global_batch_size: int | None, dp_size: int
) -> list[int]:
    """A user's splitter: two steps of equal rollouts."""
    assert rollout_samples.tolist() == [2, 1, 1, 1]
    assert rollout_tokens.tolist() == [8, 4, 4, 4]
    assert (global_batch_size, dp_size) == (3, 2)
    return [2, 2]


def plan(**settings: Any) -> rs.SchedulePlan:
    """Five samples of four rollouts: 10 has two."""
    base: dict[str, Any] = {
        "total_lengths": [4, 4, 4, 4, 4],
        "rollout_ids": [10, 11, 10, 12, 13],
        "global_batch_size": 3,
        "dp_size": 1,
        "max_tokens_per_gpu": 16,
    }
    return rs.build_dp_schedule(**{**base, **settings})


def test_rollouts_are_grouped_in_first_occurrence_order() -> None:
    rollouts = group_rollouts(np.array([7, 3, 7, -1, 3]))
    assert rollouts.ids.tolist() == [7, 3, -1]
    assert rollouts.offsets.tolist() == [0, 2, 4, 5]
    assert rollouts.positions.tolist() == [0, 2, 1, 4, 3]


def test_trailing_rollouts_are_dropped_listed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rl_schedule"):
        found = plan()
    assert (found.global_batch_sizes, found.dropped_rollouts, found.dropped_samples) == (
        (3,),
        (13,),
        (4,),
    )
    assert "dropping 1 of 4 rollouts" in caplog.text


def test_trailing_rollouts_make_a_partial_step() -> None:
    found = plan(on_trailing="partial_step")
    assert (found.global_batch_sizes, found.dropped_rollouts) == ((3, 1), ())


def test_trailing_rollouts_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        rs.InfeasibleScheduleError, match=r"4 rollouts .* steps of 3.*1 are left over"
    ):
        plan(on_trailing="error")


def test_sizes_give_a_variable_global_batch() -> None:
    found = plan(splitter="sizes", global_batch_size=[1, 3])
    assert found.global_batch_sizes == (1, 3)
    assert sorted(found.micro_batch_samples(0, 0).tolist()) == [0, 2]


def test_sizes_beyond_the_rollouts_follow_the_trailing_policy() -> None:
    assert plan(
        splitter="sizes", global_batch_size=[2, 5, 5], on_trailing="partial_step"
    ).global_batch_sizes == (2, 2)
    assert plan(splitter="sizes", global_batch_size=[2, 5, 5]).dropped_rollouts == (12, 13)
    with pytest.raises(rs.InfeasibleScheduleError, match="2 steps are short"):
        plan(splitter="sizes", global_batch_size=[2, 5, 5], on_trailing="error")


def test_all_takes_every_rollout_in_one_step() -> None:
    assert plan(splitter="all", global_batch_size=None).global_batch_sizes == (4,)


def test_a_user_splitter_decides() -> None:
    assert plan(splitter=by_halves, dp_size=2).global_batch_sizes == (2, 2)


def test_a_user_splitter_is_imported_by_path(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_splitter.py").write_text(
        "class Cut:\n    @staticmethod\n    def ones(**kw):\n        return [1] *"
        " len(kw['rollout_samples'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = plan(splitter="their_splitter:Cut.ones")
    assert found.global_batch_sizes == (1, 1, 1, 1)
    assert found.settings["splitter"] == "their_splitter:Cut.ones"


@pytest.mark.parametrize(
    ("answer", "words"),
    [([3, 3], "6 rollouts in 2 steps, but there are 4"), ([0], "0"), ([1.5], "1.5")],
)
def test_a_wrong_answer_of_a_user_splitter_is_refused(answer: list[int], words: str) -> None:
    with pytest.raises(rs.ScheduleError, match=words):
        plan(splitter=lambda **_: answer)


@pytest.mark.parametrize(
    ("splitter", "words"),
    [
        (lambda **_: None, "TypeError"),
        (lambda **_: 4, "TypeError"),
        (lambda: [4], "TypeError"),
        (lambda **_: dict[str, Any]()["size"], "KeyError: 'size'"),
        (lambda **_: (1 // 0 for _ in range(2)), "ZeroDivisionError"),
        (lambda **_: [2**70], "71 bits"),
        (lambda **_: [None], "None"),
        (lambda **_: "22", "'2'"),
    ],
)
def test_what_a_user_splitter_raises_is_an_error_of_this_package(splitter: Any, words: str) -> None:
    with pytest.raises(rs.ScheduleError, match="splitter") as caught:
        plan(splitter=splitter)
    assert words in str(caught.value)


def test_a_splitter_that_spoils_its_arrays_changes_nothing_of_the_plan() -> None:
    def spoil(**arrays: Any) -> list[int]:
        arrays["rollout_samples"][:] = 0
        arrays["rollout_tokens"][:] = 0
        return [4]

    assert plan(splitter=spoil) == plan(splitter=lambda **_: [4])


def test_a_splitter_whose_module_fails_is_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_splitter.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "unfinished_splitter.py").write_text("def cut(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, words in (("failing", "no licence"), ("unfinished", "SyntaxError")):
        with pytest.raises(rs.ScheduleError, match=words):
            plan(splitter=f"{name}_splitter:cut")


def test_step_sizes_beyond_int64_in_sum_are_no_smaller() -> None:
    """Three times 2**62 is 2**63 + 2**62, which int64 would read as negative."""
    assert plan(
        splitter="sizes", global_batch_size=[2**62] * 3, on_trailing="partial_step"
    ).global_batch_sizes == (4,)


def test_fewer_rollouts_than_one_step_names_both_numbers() -> None:
    with pytest.raises(
        rs.InfeasibleScheduleError, match=r"4 rollouts are fewer than the 5 of one step"
    ):
        plan(global_batch_size=5)


@pytest.mark.parametrize(
    "settings", [{"on_trailing": "partial_step"}, {"splitter": "all", "global_batch_size": None}]
)
def test_an_empty_batch_is_an_empty_plan_where_nothing_has_to_train(
    settings: dict[str, Any],
) -> None:
    found = plan(total_lengths=[], rollout_ids=[], dp_size=2, **settings)
    assert (found.num_microbatches, found.global_batch_sizes, found.micro_batch_indices) == (
        (),
        (),
        [[], []],
    )
    assert [part.size for part in found.partitions] == [0, 0]
    assert found.rank_view(1).partition.size == 0


@pytest.mark.parametrize(
    ("rollouts", "ranks", "size"), [(13, 4, 12), (12, 4, 12), (3, 4, 4), (1, 1, 1)]
)
def test_dynamic_global_batch_size_is_a_multiple_of_the_ranks(
    rollouts: int, ranks: int, size: int
) -> None:
    assert rs.compute_dynamic_global_batch_size(rollouts, ranks) == size


def test_dynamic_global_batch_size_needs_positive_numbers() -> None:
    with pytest.raises(rs.ScheduleError, match="num_rollouts"):
        rs.compute_dynamic_global_batch_size(0, 4)
