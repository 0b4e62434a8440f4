"""One rule for every column: lists, arrays, arrays of objects, tensors; integers or strings."""

from typing import Any
from uuid import UUID

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.arrays import cost_column, identifier_column, integer_column

GOOD: dict[str, Any] = {"global_batch_size": 2, "dp_size": 1, "max_tokens_per_gpu": 20}


class Tensor:
    """As much of a tensor as is asked for: one on another device that wants its gradient."""

    def __init__(self, values: Any, dtype: str) -> None:
        self.values, self.dtype, self.steps = np.array(values), dtype, ["created"]

    def detach(self) -> "Tensor":
        self.steps.append("detached")
        return self

    def cpu(self) -> "Tensor":
        assert "detached" in self.steps
        self.steps.append("on the host")
        return self

    def float(self) -> np.ndarray[Any, Any]:
        return self.values.astype(np.float32)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray[Any, Any]:
        assert "on the host" in self.steps
        return self.values


@pytest.mark.parametrize(
    "values",
    [
        [5, 6],
        (5, 6),
        range(5, 7),
        np.array([5, 6], dtype=np.int16),
        np.array([5, 6], dtype=np.uint64),
        np.array([5, 6], dtype=object),
        np.array([np.int32(5), 6], dtype=object),
        [np.int64(5), np.uint8(6)],
        [np.array(5), np.array(6)],
        Tensor([5, 6], "torch.int32"),
    ],
    ids=lambda values: type(values).__name__,
)
def test_integers_in_any_container_are_one_column(values: Any) -> None:
    column = integer_column(values, "lengths")
    assert column.tolist() == [5, 6]
    assert column.dtype == np.int64
    assert not column.flags.writeable


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array([5, 6.0], dtype=object), r"lengths\[1\] is 6.0"),
        (np.array([5, True], dtype=object), r"lengths\[1\] is True"),
        (np.array(["5", "6"], dtype=object), r"lengths\[0\] is '5'"),
        (np.array([5, None], dtype=object), r"lengths\[1\] is None"),
        (np.array(["5", "6"]), r"lengths\[0\]"),
        (np.array([[5, 6]], dtype=object), "one-dimensional"),
        (Tensor([5.0, 6.0], "torch.bfloat16"), r"lengths\[0\] is .*5.0"),
        (Tensor([True, False], "torch.bool"), r"lengths\[0\] is .*True"),
        ([np.array(5.0)], r"lengths\[0\] is 5.0"),
        ([[5], [6]], r"lengths\[0\] is \[5\]"),
        ({5: 6}.keys, "lengths must be a sequence"),
        (b"56", "bytes"),
    ],
)
def test_what_is_no_column_of_integers_is_refused(values: Any, words: str) -> None:
    with pytest.raises(rs.ScheduleError, match=words):
        integer_column(values, "lengths")


def test_a_real_tensor_is_a_column() -> None:
    torch = pytest.importorskip("torch")
    plan = rs.build_dp_schedule(
        total_lengths=torch.tensor([5, 6]), rollout_ids=[torch.tensor(3), torch.tensor(4)], **GOOD
    )
    assert plan == rs.build_dp_schedule(total_lengths=[5, 6], rollout_ids=[3, 4], **GOOD)
    for wrong in (torch.tensor([5.0, 6.0]), torch.tensor([True, False]), torch.ones(2, 2).long()):
        with pytest.raises(rs.ScheduleError, match="total_lengths"):
            rs.build_dp_schedule(total_lengths=wrong, rollout_ids=[3, 4], **GOOD)
    costs = cost_column(torch.tensor([1.5, 2.0], dtype=torch.bfloat16, requires_grad=True), "costs")
    assert costs.tolist() == [1.5, 2.0]


@pytest.mark.parametrize(
    "ids",
    [
        ["b", "a", "b"],
        ("b", "a", "b"),
        np.array(["b", "a", "b"]),
        np.array(["b", "a", "b"], dtype=object),
    ],
)
def test_strings_are_numbered_by_first_appearance(ids: Any) -> None:
    column, names = identifier_column(ids, "ids")
    assert (column.tolist(), names) == ([0, 1, 0], ("b", "a"))


def test_the_names_stand_beside_the_plan() -> None:
    plan = rs.build_dp_schedule(
        total_lengths=[5, 6, 7], rollout_ids=["x9", "x9", "c4"], **{**GOOD, "global_batch_size": 1}
    )
    assert plan.rollout_names == ("x9", "c4")
    assert plan == rs.build_dp_schedule(
        total_lengths=[5, 6, 7], rollout_ids=[0, 0, 1], **{**GOOD, "global_batch_size": 1}
    )
    assert rs.SchedulePlan.from_document(plan.to_document()).rollout_names == ("x9", "c4")
    one_step = rs.build_dp_schedule(total_lengths=[5, 6, 7], rollout_ids=["a", "b", "c"], **GOOD)
    assert [one_step.rollout_names[i] for i in one_step.dropped_rollouts] == ["c"]


def test_names_may_be_given_with_their_numbers() -> None:
    """As `dataclasses.replace` does."""
    request = rs.ScheduleRequest(
        total_lengths=[5, 6], rollout_ids=[1, 0], rollout_names=["a", "b"], **GOOD
    )
    assert request.rollout_names == ("a", "b")
    cases: tuple[tuple[Any, Any, str], ...] = (
        ([0, 2], ["a", "b"], "names 2 rollouts, but rollout_ids go from 0 to 2"),
        ([-1, 0], ["a", "b"], "go from -1 to 0"),
        (["a", "b"], ["b", "a"], "filled in where rollout_ids are strings"),
        ([0, 1], "ab", "list of strings"),
        ([0, 1], [3, 4], "list of strings"),
    )
    for ids, names, words in cases:
        with pytest.raises(rs.ScheduleError, match=words):
            rs.ScheduleRequest(total_lengths=[5, 6], rollout_ids=ids, rollout_names=names, **GOOD)


@pytest.mark.parametrize(
    ("ids", "beside"),
    [
        (["a", 1], r"\[0\] is 'a' and rollout_ids\[1\] is 1$"),
        ([1, "a"], r"\[0\] is 1 and rollout_ids\[1\] is 'a'$"),
        (["a", None], r"\[0\] is 'a' and rollout_ids\[1\] is None$"),
        (np.array([1, "a"], dtype=object), r"\[0\] is 1 and rollout_ids\[1\] is 'a'$"),
        ([UUID(int=5), UUID(int=6)], r"\[0\] is UUID\('0{8}-.*5'\)$"),
        (np.array([UUID(int=5), "a"]), r"\[0\] is UUID\('.*5'\) and rollout_ids\[1\] is 'a'$"),
    ],
)
def test_ids_of_two_kinds_or_of_none_are_refused(ids: Any, beside: str) -> None:
    words = r"rollout_ids must be all integers or all strings \(try str\(id\)\), but rollout_ids"
    with pytest.raises(rs.ScheduleError, match=words + beside):
        rs.ScheduleRequest(total_lengths=[5, 6], rollout_ids=ids, **GOOD)


def test_text_is_never_read_as_a_number() -> None:
    for name in ("total_lengths", "sample_costs"):
        with pytest.raises(rs.ScheduleError, match=name):
            rs.ScheduleRequest(
                **{"total_lengths": [5, 6], "rollout_ids": [0, 1], **GOOD, name: ["5", "6"]}
            )
