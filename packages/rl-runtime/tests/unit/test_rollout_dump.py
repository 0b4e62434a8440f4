"""What is loaded from a rollout dump is what was dumped; a file that does not fit is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_dump import RaggedArray, open_dump, write_dump
from rl_runtime.batch.columns import batch_columns
from rl_runtime.config import Recipe
from rl_runtime.errors import ConfigError
from rl_runtime.records import Sample
from rl_runtime.rollout.dump import RolloutDumper, load_rollout_dump
from rl_topp import NucleusSet


def make_sample(rollout: int, response: int) -> Sample:
    return Sample(
        rollout_id=rollout,
        group_id=rollout // 2,
        sample_index=None if rollout == 1 else rollout,
        prompt_tokens=np.array([3, 4]),
        response_tokens=np.arange(response) + 5,
        loss_mask=np.ones(response, np.int32),
        rollout_log_probs=-np.arange(response, dtype=np.float32),
        weight_versions=np.full(response, 2),
        nucleus=NucleusSet.from_lists([[token + 5, 1] for token in range(response)], vocab_size=32),
        reward=float(rollout),
    )


SAMPLES = [make_sample(0, 3), make_sample(1, 1), make_sample(2, 2), make_sample(3, 4)]


def recipe(folder: Path, **debug: str) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"dir": str(folder)},
            "dump": {"rollout": "{run_dir}/rollout_{batch_id}.parquet"},
            "debug": debug,
        }
    )


def dumped(folder: Path) -> Path:
    columns = batch_columns(SAMPLES, divide_by_std=True)
    dumper = RolloutDumper(recipe(folder))
    dumper.write(7, columns, SAMPLES)
    dumper.close()
    return folder / "rollout_7.parquet"


def changed(path: Path, **columns: Any) -> Path:
    """The same dump with other columns; None leaves one out."""
    with open_dump(path) as dump:
        found = {name: dump.column(name) for name in dump.fields} | columns
        given = {name: column for name, column in found.items() if column is not None}
        other = path.with_name("changed.parquet")
        return write_dump(other, contract=dump.contract, batch_id=7, columns=given)


def load(path: Path, *, vocab_size: int = 32) -> dict[str, Any]:
    where = recipe(path.parent, load_rollout_dump=str(path))
    return {**load_rollout_dump(where, 7, vocab_size=vocab_size)}


def test_what_was_dumped_is_loaded_bit_by_bit(tmp_path: Path) -> None:
    columns, found = batch_columns(SAMPLES, divide_by_std=True), load(dumped(tmp_path))
    assert sorted(found) == sorted(columns)
    for name, column in columns.items():
        ours, theirs = (
            item.values if isinstance(item, RaggedArray) else np.asarray(item)
            for item in (column, found[name])
        )
        assert ours.dtype == theirs.dtype, name
        assert np.array_equal(ours, theirs), name


def test_a_recipe_without_a_template_writes_nothing(tmp_path: Path) -> None:
    dumper = RolloutDumper(Recipe.model_validate({"dump": {"rollout": ""}}))
    dumper.write(0, batch_columns(SAMPLES, divide_by_std=True), SAMPLES)
    dumper.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"raw_reward": None}, r"lacks the fields \['raw_reward'\]"),
        (
            {"rollout_log_probs": RaggedArray.from_list([[0.5] * n for n in (3, 1, 2, 4)], float)},
            "rollout_log_probs has dtype float64, not float32",
        ),
    ],
)
def test_a_dump_that_does_not_fit_a_batch_is_refused(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(changed(dumped(tmp_path), **columns))
    assert str(caught.value).startswith("debug.load_rollout_dump = ")


def test_ids_that_the_model_does_not_know_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="field tokens has id 8, but the model has 8 ids"):
        load(dumped(tmp_path), vocab_size=8)
    ids = load(dumped(tmp_path))["nucleus_ids"]
    wrong = RaggedArray(ids.values + np.int32(30), ids.offsets)
    with pytest.raises(ConfigError, match="field nucleus_ids has id 38, but the model has 32 ids"):
        load(changed(dumped(tmp_path), nucleus_ids=wrong))
