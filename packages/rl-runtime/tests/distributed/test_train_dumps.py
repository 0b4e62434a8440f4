"""Train dumps of real ranks: written beside the training, whole, without a trace in numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from rl_dump import ROLLOUT_DUMP, RaggedArray, WriteError, join, open_dump, write_dump
from rl_runtime.batch.plan import plan_batch
from rl_runtime.training.trainer import Trainer
from rl_schedule import TokenCost

if TYPE_CHECKING:
    from distributed.conftest import Batch, MakeRecipe, RunRanks

pytestmark = pytest.mark.distributed

Numbers = tuple[list[Mapping[str, float]], dict[str, npt.NDArray[np.generic]] | None]


def test_training_is_the_same_bits_with_the_dump_on_and_off(
    make_recipe: MakeRecipe, run_ranks: RunRanks, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    def trained(template: str) -> list[Numbers]:
        recipe = make_recipe(tmp_path / "run", {"data": 2}, dump={"train": template})

        def rank_main(rank: int, rendezvous: str) -> Numbers:
            trainer = Trainer(
                recipe, rank=rank, world_size=2, rendezvous=rendezvous, model_folder=model_folder
            )
            trainer.start_reinforcement()
            # Two batches: while the second is trained on, the first is written.
            reports = [
                report
                for _ in range(2)
                for report in trainer.train_batch(batch.rank_batch(recipe, rank), 1e-3)
            ]
            weights = trainer.export_weights()
            trainer.close()
            return [
                {name: value for name, value in report.items() if "second" not in name}
                for report in reports
            ], weights

        return run_ranks(2, rank_main)

    on, off = trained(f"{tmp_path}/train_{{batch_id}}.parquet"), trained("")
    assert [path.name for path in tmp_path.iterdir()] == ["train_0.parquet"]
    assert len(on[0][0]) == 4
    for (reports, weights), (expected_reports, expected_weights) in zip(on, off, strict=True):
        assert reports == expected_reports
        assert (weights is None) == (expected_weights is None)
        if weights is not None and expected_weights is not None:
            assert {name: array.tobytes() for name, array in weights.items()} == {
                name: array.tobytes() for name, array in expected_weights.items()
            }


def test_a_dump_that_cannot_be_written_ends_the_run_at_the_next_batch_or_at_the_end(
    make_recipe: MakeRecipe, run_ranks: RunRanks, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    recipe = make_recipe(
        tmp_path / "run", {"data": 1}, dump={"train": f"{tmp_path}/file/train_{{batch_id}}.parquet"}
    )

    def rank_main(rank: int, rendezvous: str) -> list[str]:
        trainer = Trainer(
            recipe, rank=rank, world_size=1, rendezvous=rendezvous, model_folder=model_folder
        )
        trainer.start_reinforcement()
        rank_batch = batch.rank_batch(recipe, 0)
        assert len(trainer.train_batch(rank_batch, 1e-3)) == 2, "the batch itself is trained on"
        with pytest.raises(WriteError) as next_batch:
            trainer.train_batch(rank_batch, 1e-3)
            trainer.train_batch(rank_batch, 1e-3)
        try:
            trainer.train_batch(rank_batch, 1e-3)
        except WriteError:
            trainer.train_batch(rank_batch, 1e-3)
        with pytest.raises(WriteError) as end:
            trainer.close()
        return [str(next_batch.value), str(end.value)]

    (messages,) = run_ranks(1, rank_main)
    pattern = (
        re.escape(
            f"dump {tmp_path}/file/train_0.parquet was not written: cannot write"
            f" {tmp_path}/file/train_0.parquet: "
        )
        + ".*"
    )
    for message in messages:
        assert re.fullmatch(pattern, message), message


def test_what_the_batch_brought_along_is_whole_again_under_context_parallelism(
    make_recipe: MakeRecipe, run_ranks: RunRanks, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    recipe = make_recipe(
        tmp_path / "run",
        {"data": 1, "context": 2},
        dump={"train": f"{tmp_path}/train_{{batch_id}}.parquet"},
    )
    given = batch.ragged["rollout_log_probs"]
    full = RaggedArray((given.values - 1).astype(np.float32), given.offsets)

    def rank_main(rank: int, rendezvous: str) -> None:
        trainer = Trainer(
            recipe, rank=rank, world_size=2, rendezvous=rendezvous, model_folder=model_folder
        )
        trainer.start_reinforcement()
        trainer.train_batch(batch.rank_batch(recipe, 0, rollout_full_log_probs=full), 1e-3)
        trainer.close()

    run_ranks(2, rank_main)
    with open_dump(tmp_path / "train_0.parquet") as dump:
        positions: Any = dump.column("rollout_position")
        assert dump.column("rollout_full_log_probs") == full.take(positions)
        assert dump.column("rollout_log_probs") == given.take(positions)
        assert dump.verify() == []


def test_the_dump_says_which_samples_the_plan_dropped_and_join_gives_the_reason(
    make_recipe: MakeRecipe, run_ranks: RunRanks, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    """17 rollouts make two steps of 8; the last rollout, two samples, is left over."""
    recipe = make_recipe(tmp_path / "run", {"data": 2})
    planned = plan_batch(batch.columns, recipe, batch_id=0, cost=TokenCost())

    def rank_main(rank: int, rendezvous: str) -> None:
        trainer = Trainer(
            recipe, rank=rank, world_size=2, rendezvous=rendezvous, model_folder=model_folder
        )
        trainer.start_reinforcement()
        trainer.train_batch(planned.rank_batches[rank], 1e-3)
        trainer.close()

    run_ranks(2, rank_main)
    rollouts, trained = tmp_path / "rollout_0.parquet", recipe.run.dir / "dumps" / "train_0.parquet"
    write_dump(rollouts, contract=ROLLOUT_DUMP, batch_id=0, columns=batch.columns)
    dump = open_dump(trained)
    assert dump.schedule is not None
    assert dump.schedule["digest"] == planned.plan.digest
    assert dump.raw_reward == batch.scalars["raw_reward"].tolist()
    joined = join(open_dump(rollouts), dump)
    count = len(batch.scalars["rollout_ids"])
    assert [missing.rollout_position for missing in joined.missing_in_train] == [
        count - 2,
        count - 1,
    ]
    for missing in joined.missing_in_train:
        assert missing.reason == "dropped: its rollout does not fill a step of 8 rollouts"
