"""What is wrong before the start is one clear line each, and nothing is started."""

import socket

import pytest

from rl_runtime.config import Recipe
from rl_runtime.errors import ConfigError
from rl_runtime.preflight import check_before_start


def problems(tmp_path, **sections):
    sections.setdefault("run", {"dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError) as caught:
        check_before_start(Recipe.model_validate(sections))
    return str(caught.value).splitlines()


def test_a_good_recipe_passes(tmp_path):
    check_before_start(Recipe.model_validate({"run": {"dir": str(tmp_path / "run")}}))


def test_an_existing_run_folder_is_refused(tmp_path):
    (line,) = problems(tmp_path, run={"dir": str(tmp_path)})
    assert "run.dir" in line
    assert "exists already" in line


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (line,) = problems(tmp_path, engine={"port": port})
    assert f"engine.port = {port}" in line


def test_a_missing_model_folder_is_named(tmp_path):
    (line,) = problems(tmp_path, model={"path": "/no/such/model"})
    assert "model.path = /no/such/model: no such folder" in line


def test_all_problems_are_reported_at_once(tmp_path):
    lines = problems(
        tmp_path,
        model={"path": str(tmp_path)},
        rollout={"generate": "no_such_module:f"},
        reward={"function": "nonsense"},
        dump={"rollout": "all.parquet", "train": ""},
    )
    assert len(lines) == 5
    for line, mention in zip(lines, ["config.json", "safetensors", "no_such_module", "module:function", "{batch_id}"], strict=True):
        assert mention in line


def test_training_from_a_dump_needs_the_policy_it_was_sampled_from(tmp_path):
    lines = problems(tmp_path, debug={"load_rollout_dump": str(tmp_path / "none.parquet")})
    assert "needs model.path" in lines[0]
    assert "no such file" in lines[1]
