"""Outputs back in order, and a micro-batch that trains nothing."""

from typing import Any

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
