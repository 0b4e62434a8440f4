"""A rank batch goes to another process as itself, and is compared with its plan there, once."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from rl_dump import RaggedArray
from rl_runtime.batch.rank_batch import Column, RankBatch, take_columns
from rl_runtime.errors import BatchMismatchError
from rl_schedule import ScheduleRequest, plan_schedule


def make_rank_batch() -> RankBatch:
    """Three samples of three rollouts on one rank."""
    plan = plan_schedule(
        ScheduleRequest(
            total_lengths=np.array([4, 3, 5]),
            rollout_ids=np.array([0, 1, 2]),
            global_batch_size=3,
            dp_size=1,
            max_tokens_per_gpu=8,
        )
    )
    view = plan.rank_view(0)
    columns: dict[str, Column] = {
        "rollout_position": np.arange(3),
        "tokens": RaggedArray.from_list([[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12]], np.int64),
    }
    return RankBatch(
        batch_id=5,
        plan=view,
        columns=take_columns(columns, view.partition),
        step_units=np.array([3.0]),
    )


def test_a_rank_batch_survives_the_way_to_another_process() -> None:
    sent = make_rank_batch()
    found: RankBatch = pickle.loads(pickle.dumps(sent))
    found.check()
    assert (found.batch_id, found.plan.digest) == (5, sent.plan.digest)
    assert found.step_units.tolist() == [3.0]
    assert list(found.columns) == list(sent.columns)
    for name, column in sent.columns.items():
        for ours, theirs in zip(column, found.columns[name], strict=True):
            assert np.array_equal(ours, theirs), name


def test_a_rank_batch_whose_samples_are_not_those_of_its_plan_is_refused() -> None:
    whole = make_rank_batch()
    fewer = replace(whole, columns=take_columns(whole.columns, np.arange(2)))
    with pytest.raises(
        BatchMismatchError,
        match=r"batch 5: the plan gives rank 0 3 samples, but these columns came .*'tokens': 2",
    ):
        fewer.check()


def test_one_column_of_another_length_is_named_alone() -> None:
    whole = make_rank_batch()
    columns = {**whole.columns, "rewards": np.zeros(4)}
    with pytest.raises(BatchMismatchError, match=r"number: \{'rewards': 4\}$"):
        replace(whole, columns=columns).check()


def test_a_trainer_actor_trains_on_nothing_that_it_has_not_checked() -> None:
    pytest.importorskip("ray")
    from rl_runtime.cluster.trainer_actor import TrainerActor

    class Trainer:
        def __init__(self) -> None:
            self.batches: list[RankBatch] = []

        def train_batch(self, batch: RankBatch, lr: float) -> list[dict[str, float]]:
            self.batches.append(batch)
            return []

    actor = TrainerActor.__new__(TrainerActor)
    trainer = Trainer()
    actor._trainer = trainer  # type: ignore[assignment]
    whole = make_rank_batch()
    assert actor.train_batch(whole, 0.1) == []
    with pytest.raises(BatchMismatchError):
        actor.train_batch(replace(whole, columns={"rewards": np.zeros(4)}), 0.1)
    assert trainer.batches == [whole]
