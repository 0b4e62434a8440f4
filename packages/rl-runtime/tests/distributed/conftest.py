"""Real gloo ranks, and one synthetic batch that trainers of any layout train on.

Ranks are forked from this process after it has imported torch and Megatron-Core once.
"""

from __future__ import annotations

import multiprocessing
import socket
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

with warnings.catch_warnings():
    # Megatron-Core warns at import, and warnings are errors here.
    warnings.simplefilter("ignore")
    import torch

    from rl_runtime.training.trainer import Trainer

from safetensors.numpy import load_file, save_file

from rl_dump import Dump, RaggedArray, open_dump
from rl_metrics import rollout_denominators
from rl_runtime.batch.rank_batch import Column, RankBatch, take_columns
from rl_runtime.config.recipe import Recipe
from rl_runtime.setup.tiny_model import write_tiny_model
from rl_schedule import build_dp_schedule

_DEADLINE_SECONDS = 120.0
_Result = TypeVar("_Result")

MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
VOCAB_SIZE = 88
GLOBAL_BATCH_SIZE = 8
NUM_ROLLOUTS = 17  # the last one does not fill a step
TOKEN_CAP = 64
_DTYPES = {
    "tokens": np.int64,
    "loss_masks": np.int32,
    "rollout_log_probs": np.float32,
    "nucleus_ids": np.int32,
    "nucleus_offsets": np.int64,
    "nucleus_status": np.uint8,
}


class RunRanks(Protocol):
    """Call `function(rank, rendezvous)` in as many processes; gives results in rank order."""

    def __call__(
        self, world_size: int, function: Callable[[int, str], _Result]
    ) -> list[_Result]: ...


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _rank_main(
    connection: Connection, function: Callable[[int, str], object], rank: int, rendezvous: str
) -> None:
    warnings.resetwarnings()
    torch.set_num_threads(1)
    try:
        connection.send((True, function(rank, rendezvous)))
    except BaseException:
        connection.send((False, traceback.format_exc()))


def _run_ranks(world_size: int, function: Callable[[int, str], _Result]) -> list[_Result]:
    context = multiprocessing.get_context("fork")
    rendezvous = f"127.0.0.1:{_free_port()}"
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=_rank_main, args=(sender, function, rank, rendezvous))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        results = []
        for rank, (receiver, _) in enumerate(pipes):
            assert receiver.poll(_DEADLINE_SECONDS), (
                f"rank {rank} of {world_size} did not answer in {_DEADLINE_SECONDS:g} s"
            )
            done, result = receiver.recv()
            assert done, f"rank {rank} of {world_size}:\n{result}"
            results.append(result)
        return results
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
            process.join()


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    return _run_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rollout batch, all samples."""

    ragged: Mapping[str, RaggedArray]
    scalars: Mapping[str, npt.NDArray[Any]]

    @property
    def columns(self) -> dict[str, Column]:
        """All columns, as the rollout side hands them out."""
        return {**self.ragged, **self.scalars}

    def rank_batch(
        self,
        recipe: Recipe,
        dp_rank: int,
        *,
        global_batch_size: int = GLOBAL_BATCH_SIZE,
        token_cap: int = TOKEN_CAP,
        **changed: Column,
    ) -> RankBatch:
        """What one data-parallel rank receives; `changed` columns replace the batch's."""
        cp_size = recipe.parallel.context
        plan = build_dp_schedule(
            total_lengths=self.scalars["total_lengths"],
            rollout_ids=self.scalars["rollout_ids"],
            global_batch_size=global_batch_size,
            dp_size=recipe.parallel.data,
            cp_size=cp_size,
            max_tokens_per_gpu=token_cap // cp_size,
            pad_to_multiple=2 * cp_size,
        )
        view = plan.rank_view(dp_rank)
        return RankBatch(
            batch_id=0,
            plan=view,
            columns=take_columns({**self.columns, **changed}, np.asarray(view.partition)),
            step_units=np.array(plan.global_batch_sizes, np.float64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came out of a warm-start step and one batch."""

    before: dict[str, npt.NDArray[Any]]
    """Weights as loaded."""
    sft: dict[str, float]
    """Report of the warm-start step; empty without one."""
    steps: list[dict[str, float]]
    """Reports of the batch's steps."""
    after: dict[str, npt.NDArray[Any]]
    """Weights after the batch."""
    dump: Dump
    """The train dump."""

    def ragged(self, name: str) -> RaggedArray:
        """A response-aligned column of the dump."""
        column = self.dump.column(name)
        assert isinstance(column, RaggedArray)
        return column

    def scalars(self, name: str) -> npt.NDArray[Any]:
        """A column of the dump with one number per sample."""
        column = self.dump.column(name)
        assert isinstance(column, np.ndarray)
        return column


class MakeRecipe(Protocol):
    """A recipe of the tiny model, of a run in `run_dir`, in a layout, with further sections."""

    def __call__(
        self, run_dir: Path, parallel: Mapping[str, int], **sections: object
    ) -> Recipe: ...


class Train(Protocol):
    """One step of fine-tuning (unless `warm_start` is off) and one batch, with their dump."""

    def __call__(
        self, recipe: Recipe, model_folder: Path, batch: Batch, *, warm_start: bool = True
    ) -> Trained: ...


@pytest.fixture(scope="session")
def make_recipe() -> MakeRecipe:
    def make(run_dir: Path, parallel: Mapping[str, int], **sections: object) -> Recipe:
        base = {
            "run": {"dir": str(run_dir)},
            "model": MODEL,
            "parallel": parallel,
            "train": {"global_batch_size": GLOBAL_BATCH_SIZE},
        }
        return Recipe.model_validate(base | sections)

    return make


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, Recipe.model_validate({"model": MODEL}).model, rng=3)
    # Weights that are larger than a fresh start's, and norms other than 1, make mistakes visible.
    generator = np.random.default_rng(5)
    path = folder / "model.safetensors"
    weights = {
        name: (
            (generator.uniform(0.5, 1.5, array.shape) if "norm" in name else array * 8).astype(
                np.float32
            )
        )
        for name, array in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def _sample(generator: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    prompt, response = int(generator.integers(2, 12)), int(generator.integers(1, 11))
    tokens = generator.integers(0, VOCAB_SIZE, prompt + response)
    mask = (generator.random(response) < 0.8).astype(np.int32)
    nuclei, status = [], []
    for position in range(response):
        # Every kind of token: nucleus, sampled without a filter, not sampled (never trained).
        kind = 2 if mask[position] == 0 and position % 2 else int(position % 5 == 4)
        others = generator.integers(0, VOCAB_SIZE, int(generator.integers(0, 8)))
        nuclei.append(
            np.unique([*others, tokens[prompt + position]]) if kind == 0 else np.zeros(0, int)
        )
        status.append(kind)
    return {
        "tokens": tokens,
        "loss_masks": mask,
        "rollout_log_probs": -generator.random(response),
        "nucleus_ids": np.concatenate(nuclei),
        "nucleus_offsets": np.cumsum([0, *map(len, nuclei)]),
        "nucleus_status": np.array(status),
    }


@pytest.fixture(scope="session")
def batch() -> Batch:
    """17 rollouts of 1 + (i mod 3) siblings, masks with holes, one rollout without any token."""
    generator = np.random.default_rng(7)
    rollout_ids = np.array(
        [rollout for rollout in range(NUM_ROLLOUTS) for _ in range(1 + rollout % 3)]
    )
    samples = [_sample(generator) for _ in rollout_ids]
    for sample, rollout in zip(samples, rollout_ids, strict=True):
        if rollout == 3:
            sample["loss_masks"][:] = 0
    masks = [sample["loss_masks"] for sample in samples]
    advantage_of_rollout = generator.standard_normal(NUM_ROLLOUTS)
    return Batch(
        ragged={
            name: RaggedArray.from_list([sample[name] for sample in samples], dtype)
            for name, dtype in _DTYPES.items()
        },
        scalars={
            "rollout_position": np.arange(len(samples)),
            "sample_index": np.arange(len(samples)),
            "rollout_ids": rollout_ids,
            "group_ids": rollout_ids // 4,
            "total_lengths": np.array([sample["tokens"].size for sample in samples]),
            "response_lengths": np.array([mask.size for mask in masks]),
            "rewards": advantage_of_rollout[rollout_ids],
            "raw_reward": generator.random(len(samples)),
            "loss_denominators": rollout_denominators(masks, rollout_ids).astype(np.float32),
        },
    )


def _without_speed(report: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in report.items() if "second" not in name}


def _train(recipe: Recipe, model_folder: Path, batch: Batch, *, warm_start: bool = True) -> Trained:
    def rank_main(rank: int, rendezvous: str) -> tuple[Any, ...]:
        trainer = Trainer(
            recipe,
            rank=rank,
            world_size=recipe.parallel.world_size,
            rendezvous=rendezvous,
            model_folder=model_folder,
        )
        dp_rank = trainer.topology.dp_rank
        examples: dict[str, Column] = {
            name: batch.ragged[name] for name in ("tokens", "loss_masks")
        }
        mine = np.arange(dp_rank, len(batch.ragged["tokens"]), recipe.parallel.data)
        before = trainer.export_weights()
        sft = trainer.train_sft_step(take_columns(examples, mine), 1e-4) if warm_start else {}
        trainer.start_reinforcement()
        steps = trainer.train_batch(
            batch.rank_batch(recipe, dp_rank, global_batch_size=recipe.train.global_batch_size),
            1e-3,
        )
        after = trainer.export_weights()
        trainer.save_hf(recipe.run.dir / "export")
        trainer.close()
        return _without_speed(sft), [_without_speed(step) for step in steps], before, after

    results = _run_ranks(recipe.parallel.world_size, rank_main)
    sft, steps, _, _ = results[0]
    for other_sft, other_steps, _, _ in results:
        assert sft == other_sft
        assert steps == other_steps
    (before,) = (weights for _, _, weights, _ in results if weights is not None)
    (after,) = (weights for _, _, _, weights in results if weights is not None)
    dump = open_dump(recipe.run.dir / "dumps" / "train_0.parquet")
    return Trained(before=before, sft=sft, steps=steps, after=after, dump=dump)


@pytest.fixture(scope="session")
def train() -> Train:
    return _train


@pytest.fixture(scope="session")
def single(
    make_recipe: MakeRecipe,
    model_folder: Path,
    batch: Batch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    """The result of one process, which every layout must give."""
    return _train(
        make_recipe(tmp_path_factory.mktemp("single") / "run", {"data": 1}), model_folder, batch
    )
