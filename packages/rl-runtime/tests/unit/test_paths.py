"""Paths of a recipe do not depend on where an actor works."""

from pathlib import Path

import pytest

from rl_runtime.config import Recipe, absolute_paths
from rl_runtime.config.run import in_run_folder


def test_relative_paths_start_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    recipe = absolute_paths(
        Recipe.model_validate(
            {
                "run": {"dir": "runs/a"},
                "model": {"path": "~/model"},
                "data": {"path": "/data/prompts.jsonl"},
                "dump": {"rollout": "dumps/{batch_id}.parquet"},
            }
        )
    )
    assert recipe.run.dir == tmp_path / "runs/a"
    assert recipe.model.path == "/home/someone/model"
    assert recipe.model.reference_path == ""
    assert recipe.data.path == "/data/prompts.jsonl"
    assert recipe.dump.rollout == str(tmp_path / "dumps/{batch_id}.parquet")
    assert recipe.dump.train == "{run_dir}/dumps/train_{batch_id}.parquet"


def test_a_run_folder_with_braces_keeps_them() -> None:
    assert (
        in_run_folder("{run_dir}/{batch_id}.parquet", Path("/a{b}")).format(batch_id=3)
        == "/a{b}/3.parquet"
    )
