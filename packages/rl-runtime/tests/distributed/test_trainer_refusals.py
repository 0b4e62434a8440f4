"""What the trainer refuses, on every rank and before it has changed anything."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl_dump import RaggedArray
from rl_runtime.errors import BatchMismatchError, ConfigError, RuntimeSetupError, TrainerError
from rl_runtime.training.trainer import Trainer

if TYPE_CHECKING:
    from distributed.conftest import Batch, MakeRecipe, RunRanks


pytestmark = pytest.mark.distributed

ONE: dict[str, int] = {"data": 1}


def test_reuse_refuses_a_plan_of_several_steps(
    run_ranks: RunRanks, make_recipe: MakeRecipe, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    rollouts = int(batch.scalars["rollout_ids"].max()) + 1
    recipe = make_recipe(
        tmp_path / "run",
        ONE,
        algorithm={"old_log_probs": "reuse"},
        train={"global_batch_size": rollouts},
        rollout={"prompts_per_batch": rollouts, "rollouts_per_prompt": 1},
    )

    def rank_main(rank: int, rendezvous: str) -> None:
        trainer = Trainer(
            recipe, rank=rank, world_size=1, rendezvous=rendezvous, model_folder=model_folder
        )
        trainer.start_reinforcement()
        with pytest.raises(TrainerError, match="2 steps"):
            trainer.train_batch(batch.rank_batch(recipe, 0), 1e-3)
        trainer.close()

    run_ranks(1, rank_main)


def test_ranks_with_different_plans_all_raise(
    run_ranks: RunRanks, make_recipe: MakeRecipe, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path / "run", {"data": 2})

    def rank_main(rank: int, rendezvous: str) -> tuple[str, str]:
        trainer = Trainer(
            recipe, rank=rank, world_size=2, rendezvous=rendezvous, model_folder=model_folder
        )
        trainer.start_reinforcement()
        rank_batch = batch.rank_batch(recipe, rank)
        if rank:
            rank_batch = dataclasses.replace(
                rank_batch, plan=dataclasses.replace(rank_batch.plan, digest="ab" * 32)
            )
        with pytest.raises(BatchMismatchError) as raised:
            trainer.train_batch(rank_batch, 1e-3)
        trainer.close()
        return rank_batch.plan.digest, str(raised.value)

    (first, message), (second, other) = run_ranks(2, rank_main)
    assert message == other
    assert first in message
    assert second in message


def test_tensor_ranks_with_different_columns_all_raise(
    run_ranks: RunRanks, make_recipe: MakeRecipe, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path / "run", {"data": 1, "tensor": 2})

    def rank_main(rank: int, rendezvous: str) -> None:
        trainer = Trainer(
            recipe, rank=rank, world_size=2, rendezvous=rendezvous, model_folder=model_folder
        )
        trainer.start_reinforcement()
        rewards = np.asarray(batch.scalars["rewards"], np.float64) + rank
        with pytest.raises(BatchMismatchError, match="columns of one data-parallel rank"):
            trainer.train_batch(batch.rank_batch(recipe, 0, rewards=rewards), 1e-3)
        trainer.close()

    run_ranks(2, rank_main)


def test_tensor_ranks_with_different_batch_ids_all_raise(
    run_ranks: RunRanks, make_recipe: MakeRecipe, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path / "run", {"data": 1, "tensor": 2})

    def rank_main(rank: int, rendezvous: str) -> None:
        trainer = Trainer(
            recipe, rank=rank, world_size=2, rendezvous=rendezvous, model_folder=model_folder
        )
        trainer.start_reinforcement()
        rank_batch = dataclasses.replace(batch.rank_batch(recipe, 0), batch_id=rank)
        with pytest.raises(
            BatchMismatchError, match=r"batch 0 of data-parallel rank 0 on ranks \[0\]; batch 1 of"
        ):
            trainer.train_batch(rank_batch, 1e-3)
        trainer.close()

    run_ranks(2, rank_main)


def test_the_share_of_another_rank_is_refused(
    run_ranks: RunRanks, make_recipe: MakeRecipe, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path / "run", {"data": 2})

    def rank_main(rank: int, rendezvous: str) -> None:
        trainer = Trainer(
            recipe, rank=rank, world_size=2, rendezvous=rendezvous, model_folder=model_folder
        )
        trainer.start_reinforcement()
        with pytest.raises(BatchMismatchError, match=f"was given the share of rank {1 - rank}"):
            trainer.train_batch(batch.rank_batch(recipe, 1 - rank), 1e-3)
        trainer.close()

    run_ranks(2, rank_main)


def test_methods_out_of_order_are_refused(
    run_ranks: RunRanks, make_recipe: MakeRecipe, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path / "run", ONE)
    masks = batch.ragged["loss_masks"]
    nothing = {
        "tokens": batch.ragged["tokens"],
        "loss_masks": RaggedArray(masks.values * 0, masks.offsets),
    }

    def rank_main(rank: int, rendezvous: str) -> None:
        trainer = Trainer(
            recipe, rank=rank, world_size=1, rendezvous=rendezvous, model_folder=model_folder
        )
        with pytest.raises(TrainerError, match="before start_reinforcement"):
            trainer.train_batch(batch.rank_batch(recipe, 0), 1e-3)
        with pytest.raises(TrainerError, match="no token"):
            trainer.train_sft_step(nothing, 1e-3)
        trainer.start_reinforcement()
        with pytest.raises(TrainerError, match="called twice"):
            trainer.start_reinforcement()
        with pytest.raises(TrainerError, match="the warm start comes first"):
            trainer.train_sft_step(nothing, 1e-3)
        trainer.close()

    run_ranks(1, rank_main)


def test_a_gradient_that_is_no_number_leaves_the_weights_alone(
    run_ranks: RunRanks, make_recipe: MakeRecipe, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path / "run", ONE)

    def rank_main(rank: int, rendezvous: str) -> bool:
        trainer = Trainer(
            recipe, rank=rank, world_size=1, rendezvous=rendezvous, model_folder=model_folder
        )
        trainer.start_reinforcement()
        before = trainer.export_weights()
        rewards = np.asarray(batch.scalars["rewards"], np.float64) * 1e38
        with pytest.raises(TrainerError, match="gradient norm"):
            trainer.train_batch(batch.rank_batch(recipe, 0, rewards=rewards), 1e-3)
        after = trainer.export_weights()
        trainer.close()
        assert before is not None
        assert after is not None
        return all(np.array_equal(before[name], after[name]) for name in before)

    assert run_ranks(1, rank_main) == [True]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"parallel": {"data": 1, "tensor": 3}},
            "parallel.tensor = 3 does not divide num_attention_heads = 4",
        ),
        (
            {"parallel": {"data": 1, "pipeline": 3}},
            "parallel.pipeline = 3 does not divide num_hidden_layers = 4",
        ),
        ({"megatron": {"recompute_granularty": "full"}}, "did you mean recompute_granularity"),
        ({"megatron": {"num_layers": 2}}, "megatron.num_layers: is decided"),
        ({"megatron": {"use_mup": True}}, "megatron.use_mup: is decided"),
        ({"megatron": {"sequence_parallel": True}}, "needs parallel.tensor > 1"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    sections: dict[str, Any],
    words: str,
    make_recipe: MakeRecipe,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    recipe = make_recipe(tmp_path, **({"parallel": ONE} | sections))
    with pytest.raises(ConfigError, match=words):
        Trainer(recipe, rank=0, world_size=1, rendezvous="127.0.0.1:1", model_folder=model_folder)


def test_a_folder_that_lacks_a_tensor_is_named(
    run_ranks: RunRanks, make_recipe: MakeRecipe, model_folder: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path / "run", ONE)
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy2(model_folder / "config.json", folder)
    weights = load_file(model_folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")

    def rank_main(rank: int, rendezvous: str) -> None:
        with pytest.raises(RuntimeSetupError, match=r"no tensor named model\.norm\.weight"):
            Trainer(recipe, rank=rank, world_size=1, rendezvous=rendezvous, model_folder=folder)

    run_ranks(1, rank_main)
