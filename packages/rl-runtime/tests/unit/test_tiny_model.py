"""The small model: the same bytes from the same start, a tokenizer that gives text back."""

import json
from pathlib import Path

import pytest

from rl_runtime.config.training import ModelSection
from rl_runtime.setup.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(path, ModelSection(), rng=3)
    return path


def test_the_same_start_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "again", ModelSection(), rng=3)
    write_tiny_model(tmp_path / "other", ModelSection(), rng=4)
    weights = [
        (path / "model.safetensors").read_bytes()
        for path in (folder, tmp_path / "again", tmp_path / "other")
    ]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_the_parameter_count_is_within_one_and_three_million(folder: Path) -> None:
    from safetensors.numpy import load_file

    assert 1e6 < sum(array.size for array in load_file(folder / "model.safetensors").values()) < 3e6


def test_text_survives_the_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Zebra 09\n-> (x+y)*2"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<eos>").ids == [1]
    assert (
        tokenizer.get_vocab_size() == json.loads((folder / "config.json").read_text())["vocab_size"]
    )


def test_an_existing_folder_is_never_overwritten(folder: Path) -> None:
    with pytest.raises(FileExistsError):
        write_tiny_model(folder, ModelSection(), rng=0)
