"""Outputs back in order, and a micro-batch that trains nothing."""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest

import rl_schedule as rs

PLAN = rs.build_dp_schedule(
    total_lengths=[4, 9, 2, 5, 1],
    rollout_ids=range(5),
    global_batch_size=5,
    dp_size=2,
    max_tokens_per_gpu=9,
)


def test_what_ran_in_the_order_of_a_plan_comes_back_in_that_of_the_batch() -> None:
    ran = [f"sample {i}" for i in PLAN.sample_positions.tolist()]
    assert rs.restore_order(ran, PLAN.sample_positions) == [f"sample {i}" for i in range(5)]
    assert rs.restore_order(tuple(ran), PLAN.sample_positions) == tuple(
        f"sample {i}" for i in range(5)
    )


def test_a_rank_restores_its_own_samples() -> None:
    view = PLAN.rank_view(1)
    ran = np.stack([view.partition, -view.partition], axis=1)
    restored = rs.restore_order(ran, view.partition)
    assert restored[:, 0].tolist() == sorted(view.partition.tolist())
    assert restored[:, 1].tolist() == [-i for i in sorted(view.partition.tolist())]


def test_a_tensor_stays_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    restored = rs.restore_order(torch.tensor([[2.0], [0.0], [1.0]]), torch.tensor([2, 0, 1]))
    assert torch.equal(restored, torch.tensor([[0.0], [1.0], [2.0]]))


@pytest.mark.parametrize("values", [[1, 2], np.zeros((4, 2)), None, iter([1, 2, 3])])
def test_another_number_of_values_is_refused(values: Any) -> None:
    with pytest.raises(rs.ScheduleError, match="for 3 positions"):
        rs.restore_order(values, [2, 0, 1])


def test_a_filler_can_be_cut_by_every_rank_and_trains_nothing() -> None:
    """2 * 2 * 3 = 12 tokens."""
    filler = rs.build_filler(token_id=7, cp_size=2, tp_size=3)
    assert filler.tokens.tolist() == [7] * 12
    assert filler.position_ids.tolist() == list(range(12))
    assert (filler.loss_mask.dtype, int(filler.loss_mask.sum())) == (np.dtype(np.int32), 0)
    assert rs.build_filler().tokens.tolist() == [0, 0]


@pytest.mark.parametrize("settings", [{"cp_size": 0}, {"tp_size": 1.5}, {"token_id": "pad"}])
def test_a_filler_of_no_size_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(rs.ScheduleError, match=next(iter(settings))):
        rs.build_filler(**settings)


class Three(NamedTuple):
    a: str
    b: str
    c: str


@pytest.mark.parametrize(
    ("values", "restored"),
    [
        (Three("c", "a", "b"), ("a", "b", "c")),
        (deque(["c", "a", "b"]), ["a", "b", "c"]),
        (range(7, 10), [8, 9, 7]),
    ],
)
def test_other_sequences_come_back_as_a_list_or_tuple(values: Any, restored: Any) -> None:
    found = rs.restore_order(values, [2, 0, 1])
    assert (type(found), found) == (type(restored), restored)


def test_a_column_is_taken_by_place_not_by_label() -> None:
    pandas = pytest.importorskip("pandas")
    ran = pandas.Series(["c", "a", "b"], index=[1, 2, 0])
    assert rs.restore_order(ran, [2, 0, 1]).tolist() == ["a", "b", "c"]
    table = pandas.DataFrame({"x": [3, 1, 2]})
    assert rs.restore_order(table, [2, 0, 1])["x"].tolist() == [1, 2, 3]


class Labelled:
    """A column whose `[]` goes by label and `iloc` by place, as in pandas."""

    class Places:
        def __getitem__(self, order: Any) -> list[str]:
            return [["c", "a", "b"][place] for place in order.tolist()]

    iloc = Places()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, order: Any) -> list[str]:
        raise KeyError(order)


class Unreadable:
    def __len__(self) -> int:
        return 3


def test_a_labelled_column_is_taken_by_place() -> None:
    assert rs.restore_order(Labelled(), [2, 0, 1]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "values",
    ["cab", b"cab", {2: "c", 0: "a", 1: "b"}, {1, 2, 3}, np.array(3), Unreadable()],
)
def test_what_has_no_places_is_refused(values: Any) -> None:
    with pytest.raises(rs.ScheduleError, match="values"):
        rs.restore_order(values, [2, 0, 1])


def test_a_tensor_without_axes_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(rs.ScheduleError, match="no entries for 1 positions"):
        rs.restore_order(torch.tensor(3.0), [0])


@pytest.mark.parametrize(
    ("positions", "words"),
    [([2, 0, 2], "2 occurs twice"), ([2, -1, 0], "-1 is negative"), ([0, 0, 1], "0 occurs twice")],
)
def test_positions_that_are_none_are_refused(positions: list[int], words: str) -> None:
    with pytest.raises(rs.ScheduleError, match=words):
        rs.restore_order(["c", "a", "b"], positions)


@pytest.mark.parametrize("size", [2**24, 2**62])
def test_a_filler_of_absurd_size_is_refused(size: int) -> None:
    with pytest.raises(rs.ScheduleError, match=f"cp_size={size}"):
        rs.build_filler(cp_size=size, tp_size=size)
