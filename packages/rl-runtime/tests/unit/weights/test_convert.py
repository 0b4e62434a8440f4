"""A model folder appears whole or not at all."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_runtime.config.training import ModelSection
from rl_runtime.errors import TrainerError
from rl_runtime.setup.tiny_model import write_tiny_model
from rl_runtime.weights.convert import save_hf_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "source", ModelSection(num_layers=1), rng=0)
    return tmp_path / "source"


def test_an_export_replaces_an_older_one_and_has_the_sources_files(
    tmp_path: Path, source: Path
) -> None:
    for value in (1.0, 2.0):
        save_hf_folder(tmp_path / "export", {"w": torch.full((3,), value)}, source)
    assert load_file(tmp_path / "export" / "model.safetensors")["w"].tolist() == [2.0] * 3
    assert (tmp_path / "export" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    assert [path.name for path in tmp_path.iterdir() if "export" in path.name] == ["export"]


def test_an_export_has_no_index_of_the_sources_files_of_weights(
    tmp_path: Path, source: Path
) -> None:
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"w": "gone"}}')
    save_hf_folder(tmp_path / "export", {"w": torch.ones(3)}, source)
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"model.safetensors", "config.json"} <= names
    assert "model.safetensors.index.json" not in names


def test_a_failed_export_names_its_folder_and_leaves_the_older_one(
    tmp_path: Path, source: Path
) -> None:
    save_hf_folder(tmp_path / "export", {"w": torch.ones(3)}, source)
    (tmp_path / "export.partial").touch()
    with pytest.raises(TrainerError, match=str(tmp_path / "export")):
        save_hf_folder(tmp_path / "export", {"w": torch.zeros(3)}, source)
    assert load_file(tmp_path / "export" / "model.safetensors")["w"].tolist() == [1.0] * 3
