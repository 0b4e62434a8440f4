"""The trainer on real gloo: the same numbers in every layout and under every loss."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from distributed.conftest import Batch, MakeRecipe, Train, Trained

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "dp2": {"data": 2},
    "tp2": {"data": 1, "tensor": 2},
    "pp2": {"data": 1, "pipeline": 2},
    "cp2": {"data": 1, "context": 2},
    "tp2pp2": {"data": 1, "tensor": 2, "pipeline": 2},
    "cp2dp2": {"data": 2, "context": 2},
}
FIRST_STEP_TOLERANCE = 1e-4
LOG_PROB_TOLERANCE = 1e-5
RECOMPUTATION = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def _assert_same(result: Trained, expected: Trained) -> None:
    for name in ("rollout_position", "response_lengths"):
        assert np.array_equal(result.scalars(name), expected.scalars(name))
    for name in ("log_probs", "entropy", "rollout_log_probs", "advantages", "returns"):
        np.testing.assert_allclose(
            result.ragged(name).values,
            expected.ragged(name).values,
            rtol=0,
            atol=LOG_PROB_TOLERANCE,
        )
    assert result.sft["warm_start/grad_norm"] == pytest.approx(
        expected.sft["warm_start/grad_norm"], rel=FIRST_STEP_TOLERANCE
    )
    _assert_same_steps(result, expected)
    for name, weight in expected.after.items():
        np.testing.assert_allclose(result.after[name], weight, rtol=0, atol=1e-4, err_msg=name)


def _assert_same_steps(result: Trained, expected: Trained) -> None:
    assert len(result.steps) == len(expected.steps)
    for step, expected_step in zip(result.steps, expected.steps, strict=True):
        assert step == pytest.approx(expected_step, rel=FIRST_STEP_TOLERANCE, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_log_probs_gradient_norms_and_weights_of_one_process(
    layout: str,
    single: Trained,
    train: Train,
    make_recipe: MakeRecipe,
    model_folder: Path,
    batch: Batch,
    tmp_path: Path,
) -> None:
    _assert_same(train(make_recipe(tmp_path / "run", LAYOUTS[layout]), model_folder, batch), single)


def test_sequence_parallelism_and_recomputation_change_nothing(
    single: Trained,
    train: Train,
    make_recipe: MakeRecipe,
    model_folder: Path,
    batch: Batch,
    tmp_path: Path,
) -> None:
    megatron = {"sequence_parallel": True, **RECOMPUTATION}
    recipe = make_recipe(
        tmp_path / "run", {"data": 1, "tensor": 2, "context": 2}, megatron=megatron
    )
    _assert_same(train(recipe, model_folder, batch), single)


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}},
        {"algorithm": {"loss_aggregation": "token_mean"}},
        {"algorithm": {"old_log_probs": "rollout"}},
    ],
    ids=["kl and entropy", "token mean", "engine's log-probs as old"],
)
def test_every_loss_is_the_same_in_all_layouts(
    sections: dict[str, Any],
    train: Train,
    make_recipe: MakeRecipe,
    model_folder: Path,
    batch: Batch,
    tmp_path: Path,
) -> None:
    if "loss_aggregation" in sections["algorithm"]:
        without = {
            name: column for name, column in batch.scalars.items() if name != "loss_denominators"
        }
        batch = dataclasses.replace(batch, scalars=without)
    one = train(make_recipe(tmp_path / "one", {"data": 1}, **sections), model_folder, batch)
    many = train(
        make_recipe(tmp_path / "many", {"data": 2, "context": 2}, **sections), model_folder, batch
    )
    _assert_same_steps(many, one)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "tp2pp2"])
def test_loading_then_exporting_returns_the_same_bits(
    layout: str,
    train: Train,
    make_recipe: MakeRecipe,
    model_folder: Path,
    batch: Batch,
    tmp_path: Path,
) -> None:
    result = train(make_recipe(tmp_path / "run", LAYOUTS[layout]), model_folder, batch)
    original = load_file(model_folder / "model.safetensors")
    assert result.before.keys() == original.keys()
    for name, array in original.items():
        assert result.before[name].tobytes() == array.tobytes(), name
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    for name, weight in result.after.items():
        assert exported[name].tobytes() == weight.tobytes(), name
    assert (tmp_path / "run" / "export" / "tokenizer.json").exists()
