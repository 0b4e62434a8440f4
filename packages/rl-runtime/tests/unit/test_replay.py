"""Replaying a micro-batch: what does not fit is refused by one line, before a model is built."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from rl_dump import REPLAY_KEY, RaggedArray, write_dump
from rl_dump.parquet.arrow_columns import CRC_KEY, HEADER_KEY
from rl_runtime.cli import app as cli
from rl_runtime.config import Recipe
from rl_runtime.errors import ReplayError
from rl_runtime.setup.tiny_model import write_tiny_model
from rl_runtime.stages.replay import MicroBatchFile, compare_log_probs, read_micro_batch
from rl_runtime.training.log_prob_provenance import LogProbProvenance

PROVENANCE = LogProbProvenance(temperature=0.7, nucleus=True, weights="batch")
PLACE = {"step": 0, "data_parallel_rank": 1, "micro_batch": 2}


def micro_batch(
    path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    contract: str = "train-dump.v2",
    without: str = "",
    highest_id: int = 9,
) -> Path:
    """Write two samples with responses of two tokens and one."""
    columns: dict[str, Any] = {
        "rollout_position": np.array([4, 7]),
        "tokens": RaggedArray.from_list([[1, 2, 3], [4, highest_id]], np.int64),
        "total_lengths": np.array([3, 2]),
        "response_lengths": np.array([2, 1]),
        "loss_masks": RaggedArray.from_list([[1, 0], [1]], np.int32),
        "log_probs": RaggedArray.from_list([[-0.5, -1.0], [-2.0]], np.float32),
    }
    columns.pop(without, None)
    given = {**PROVENANCE.to_metadata(), REPLAY_KEY: PLACE} if metadata is None else metadata
    return write_dump(path, contract=contract, batch_id=3, columns=columns, metadata=given)


def test_a_micro_batch_says_where_it_ran_and_how_it_was_scored(tmp_path: Path) -> None:
    found = read_micro_batch(micro_batch(tmp_path / "one.parquet"), vocab_size=10)
    assert (
        found.batch_id,
        found.step,
        found.data_parallel_rank,
        found.micro_batch,
        found.provenance,
    ) == (3, 0, 1, 2, PROVENANCE)
    assert found.rollout_positions.tolist() == [4, 7]
    assert [item.tolist() for item in found.log_probs] == [[-0.5, -1.0], [-2.0]]
    assert "log_probs" not in found.columns


@pytest.mark.parametrize(
    ("changed", "vocab_size", "message"),
    [
        pytest.param(
            {"metadata": PROVENANCE.to_metadata()},
            10,
            "a train-dump.v2 of a whole batch; export one micro-batch",
            id="whole batch",
        ),
        pytest.param(
            {"contract": "rollout-dump.v1"},
            10,
            "a rollout-dump.v1 of a whole batch",
            id="rollout dump",
        ),
        pytest.param(
            {"metadata": {REPLAY_KEY: {"step": "0"}}}, 10, "of a whole batch", id="not a place"
        ),
        pytest.param(
            {"metadata": {REPLAY_KEY: PLACE}},
            10,
            "does not say how its log-probs were computed",
            id="no provenance",
        ),
        pytest.param(
            {
                "metadata": {
                    REPLAY_KEY: PLACE,
                    "scoring": {"temperature": 0.0, "kept_sets": True, "weights": "batch"},
                }
            },
            10,
            "does not say how its log-probs were computed",
            id="wrong provenance",
        ),
        pytest.param(
            {
                "metadata": {
                    REPLAY_KEY: {**PLACE, "step": 1},
                    **LogProbProvenance(
                        temperature=1.0, nucleus=True, weights="step"
                    ).to_metadata(),
                }
            },
            10,
            "step 1 are under weights that changed within the batch",
            id="weights that nobody has",
        ),
        pytest.param(
            {"without": "log_probs"}, 10, "lacks the fields log_probs", id="missing field"
        ),
        pytest.param({}, 9, "field tokens has id 9, but the model has 9 ids", id="vocabulary"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused(
    tmp_path: Path, changed: dict[str, Any], vocab_size: int, message: str
) -> None:
    path = micro_batch(tmp_path / "one.parquet", **changed)
    with pytest.raises(ReplayError, match=message) as refused:
        read_micro_batch(path, vocab_size=vocab_size)
    assert str(refused.value).startswith(f"{path}: ")


def test_ids_of_a_nucleus_are_ids_too(tmp_path: Path) -> None:
    kept: dict[str, Any] = {
        "rollout_position": np.array([0]),
        "tokens": RaggedArray.from_list([[1, 2]], np.int64),
        "total_lengths": np.array([2]),
        "response_lengths": np.array([1]),
        "loss_masks": RaggedArray.from_list([[1]], np.int32),
        "log_probs": RaggedArray.from_list([[-0.5]], np.float32),
        "nucleus_ids": RaggedArray.from_list([[2, 30]], np.int32),
        "nucleus_offsets": RaggedArray.from_list([[0, 2]], np.int64),
        "nucleus_status": RaggedArray.from_list([[0]], np.uint8),
    }
    metadata = {**PROVENANCE.to_metadata(), REPLAY_KEY: PLACE}
    path = write_dump(
        tmp_path / "one.parquet",
        contract="train-dump.v2",
        batch_id=0,
        columns=kept,
        metadata=metadata,
    )
    with pytest.raises(ReplayError, match="field nucleus_ids has id 30, but the model has 30 ids"):
        read_micro_batch(path, vocab_size=30)
    assert "nucleus_ids" in read_micro_batch(path, vocab_size=31).columns


def given(tmp_path: Path) -> MicroBatchFile:
    return read_micro_batch(micro_batch(tmp_path / "one.parquet"), vocab_size=10)


def test_the_largest_difference_is_found_with_its_place(tmp_path: Path) -> None:
    found = compare_log_probs(given(tmp_path), np.array([-0.5, -1.25, -2.125], np.float32))
    assert (found.num_samples, found.num_tokens, found.largest) == (2, 3, 0.25)
    assert (found.rollout_position, found.token, found.dumped, found.replayed) == (
        4,
        1,
        -1.0,
        -1.25,
    )
    last = compare_log_probs(given(tmp_path), np.array([-0.5, -1.25, -3.0], np.float32))
    assert (last.rollout_position, last.token, last.largest) == (7, 0, 1.0)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_what_is_not_a_number_is_infinitely_far_away(tmp_path: Path, wrong: float) -> None:
    found = compare_log_probs(given(tmp_path), np.array([-9.0, wrong, -2.0], np.float32))
    assert (found.largest, found.token) == (math.inf, 1)


@pytest.mark.parametrize(
    ("old_log_probs", "weights"), [("recompute", "batch"), ("rollout", "step")]
)
def test_provenance_comes_back_from_metadata_as_it_was(old_log_probs: str, weights: str) -> None:
    recipe = Recipe.model_validate(
        {
            "rollout": {"temperature": 0.5, "replay": False},
            "algorithm": {"old_log_probs": old_log_probs},
        }
    )
    provenance = LogProbProvenance.of_recipe(recipe)
    assert (provenance.temperature, provenance.nucleus, provenance.weights) == (0.5, False, weights)
    metadata = json.loads(json.dumps(provenance.to_metadata()))
    assert LogProbProvenance.of_metadata(metadata, where="x") == provenance


def of_another_major(file: Path, changed: Path) -> Path:
    """Write a dump again as train-dump.v9, with a header that is sealed anew."""
    table, given = pq.read_table(file), pq.read_metadata(file).metadata
    header = given[HEADER_KEY.encode()].replace(b"train-dump.v2", b"train-dump.v9")
    seal = str(zlib.crc32(header)).encode()
    metadata = {HEADER_KEY.encode(): header, CRC_KEY.encode(): seal}
    pq.write_table(table.replace_schema_metadata(metadata), changed)
    return changed


def run(file: Path, model: Path) -> Result:
    return CliRunner().invoke(cli.app, ["replay", str(file), "--model", str(model)])


def test_on_the_command_line_each_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    # The command hides GPUs from its own process, which is this one.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file, model = micro_batch(tmp_path / "one.parquet"), tmp_path / "model"
    write_tiny_model(model, Recipe.model_validate({}).model, rng=0)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "text.parquet").write_text("PAR2")
    whole = micro_batch(tmp_path / "whole.parquet", metadata=PROVENANCE.to_metadata())
    foreign = micro_batch(tmp_path / "foreign.parquet", highest_id=100_000)
    for arguments, mentions in {
        (
            tmp_path / "none.parquet",
            model,
        ): "none.parquet: cannot be opened: No such file or directory",
        (tmp_path / "text.parquet", model): "text.parquet: not a Parquet file",
        (whole, model): "whole.parquet: a train-dump.v2 of a whole batch",
        (
            of_another_major(file, tmp_path / "later.parquet"),
            model,
        ): "later.parquet: its contract is 'train-dump.v9'",
        (foreign, model): "field tokens has id 100000, but the model has",
        (file, tmp_path / "nowhere"): "nowhere: no such folder",
        (file, tmp_path): "config.json",
        (file, other): "model_type is 'mamba'",
    }.items():
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        (line,) = result.output.splitlines()
        assert line.startswith("error: ")
        assert mentions in line
