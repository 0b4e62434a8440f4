"""A micro-batch that any layout trained on gives the dumped log-probs again, alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl_dump import export_micro_batch, open_dump
from rl_runtime.errors import RuntimeSetupError
from rl_runtime.stages.replay import Replayed, replay

if TYPE_CHECKING:
    from distributed.conftest import Batch, MakeRecipe, RunRanks, Train

pytestmark = pytest.mark.distributed


def exported(dump_path: Path, folder: Path) -> dict[Path, int]:
    """Write every micro-batch of a dump; gives their numbers of samples."""
    with open_dump(dump_path) as dump:
        places = np.stack(
            [
                np.asarray(dump.column(name))
                for name in ("step", "data_parallel_rank", "micro_batch")
            ],
            axis=1,
        )
        found = {}
        for place, count in zip(*np.unique(places, axis=0, return_counts=True), strict=True):
            step, rank, micro_batch = place.tolist()
            target = folder / f"{step}_{rank}_{micro_batch}.parquet"
            export_micro_batch(
                dump, target, step=step, data_parallel_rank=rank, micro_batch=micro_batch
            )
            found[target] = int(count)
    return found


@pytest.mark.parametrize(
    ("parallel", "rollout"),
    [
        pytest.param(
            {"data": 2, "context": 2},
            {"temperature": 0.7},
            id="DP 2 x CP 2, nuclei, temperature 0.7",
        ),
        pytest.param(
            {"data": 1, "tensor": 2},
            {"temperature": 1.3, "replay": False},
            id="TP 2, whole vocabulary, temperature 1.3",
        ),
    ],
)
def test_every_micro_batch_gives_the_dumped_log_probs(
    parallel: dict[str, int],
    rollout: dict[str, object],
    make_recipe: MakeRecipe,
    train: Train,
    run_ranks: RunRanks,
    model_folder: Path,
    batch: Batch,
    tmp_path: Path,
) -> None:
    result = train(
        make_recipe(tmp_path / "run", parallel, rollout=rollout),
        model_folder,
        batch,
        warm_start=False,
    )
    files = exported(tmp_path / "run" / "dumps" / "train_0.parquet", tmp_path)
    assert len(files) > 4

    def rank_main(rank: int, rendezvous: str) -> list[Replayed]:
        return [replay(path, model_folder)[1] for path in files]

    ((replayed),) = run_ranks(1, rank_main)
    assert [found.num_samples for found in replayed] == list(files.values())
    assert sum(found.num_tokens for found in replayed) == result.ragged("log_probs").values.size
    assert max(found.largest for found in replayed) <= 1e-5
    assert np.abs(result.ragged("log_probs").values).max() > 1


def test_other_weights_show_and_weights_of_another_shape_are_refused(
    make_recipe: MakeRecipe,
    train: Train,
    run_ranks: RunRanks,
    model_folder: Path,
    batch: Batch,
    tmp_path: Path,
) -> None:
    train(make_recipe(tmp_path / "run", {"data": 1}), model_folder, batch, warm_start=False)
    path = next(iter(exported(tmp_path / "run" / "dumps" / "train_0.parquet", tmp_path)))
    weights = load_file(model_folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    (narrow / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    save_file({**weights, name: weights[name][:, :-8].copy()}, narrow / "model.safetensors")

    def rank_main(rank: int, rendezvous: str) -> tuple[float, str]:
        with pytest.raises(RuntimeSetupError) as refused:
            replay(path, narrow)
        return replay(path, tmp_path / "run" / "export")[1].largest, str(refused.value)

    ((largest, message),) = run_ranks(1, rank_main)
    assert largest > 1e-3, "two optimizer steps later the log-probs are others"
    assert name in message
    assert str(narrow) in message
