"""KL against a reference with replay: over the nucleus or the vocabulary, as the recipe says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from rl_runtime.config.recipe import Recipe
from rl_runtime.setup.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from distributed.conftest import Batch, MakeRecipe, Train, Trained

pytestmark = pytest.mark.distributed

FULL = {"full_scores": True}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "kept set by default": ({}, "log_probs"),
    "vocabulary where full scores are asked for": (FULL, "full_log_probs"),
    "kept set in spite of full scores": ({**FULL, "kl_log_probs": "kept_set"}, "log_probs"),
    "vocabulary by name": ({**FULL, "kl_log_probs": "full"}, "full_log_probs"),
}


@pytest.fixture(scope="session")
def reference_folder(
    model_folder: Path, make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Another model of the same shape."""
    folder = tmp_path_factory.mktemp("reference") / "tiny"
    write_tiny_model(folder, make_recipe(folder, {"data": 1}).model, rng=4)
    generator = np.random.default_rng(6)
    weights = load_file(model_folder / "model.safetensors")
    moved = {
        name: weight + 0.05 * generator.standard_normal(weight.shape).astype(np.float32)
        for name, weight in weights.items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def of_reference(
    train: Train,
    make_recipe: MakeRecipe,
    reference_folder: Path,
    batch: Batch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    """The reference as policy: its log-probs before its first step are what a KL term must see."""
    recipe = make_recipe(
        tmp_path_factory.mktemp("of_reference") / "run", {"data": 1}, algorithm=FULL
    )
    return train(recipe, reference_folder, batch, warm_start=False)


def _k3(log_probs: npt.NDArray[Any], ref_log_probs: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    difference = ref_log_probs.astype(np.float64) - log_probs
    return np.asarray(np.expm1(difference) - difference)


def _recipe(
    make_recipe: MakeRecipe,
    run_dir: Path,
    reference: Path,
    algorithm: dict[str, Any],
    parallel: dict[str, int],
) -> Recipe:
    model = {**make_recipe(run_dir, parallel).model.model_dump(), "reference_path": str(reference)}
    return make_recipe(run_dir, parallel, algorithm={"kl_coef": 0.1, **algorithm}, model=model)


@pytest.mark.parametrize("case", CASES)
def test_policy_and_reference_are_compared_over_what_the_recipe_says(
    case: str,
    train: Train,
    make_recipe: MakeRecipe,
    model_folder: Path,
    reference_folder: Path,
    of_reference: Trained,
    batch: Batch,
    tmp_path: Path,
) -> None:
    algorithm, score = CASES[case]
    recipe = _recipe(make_recipe, tmp_path / "run", reference_folder, algorithm, {"data": 1})
    result = train(recipe, model_folder, batch, warm_start=False)
    np.testing.assert_allclose(
        result.ragged("ref_log_probs").values, of_reference.ragged(score).values, rtol=0, atol=1e-6
    )
    first_step = np.repeat(result.scalars("step") == 0, result.scalars("response_lengths"))
    trained = result.ragged("loss_masks").values == 1
    expected = _k3(result.ragged(score).values, result.ragged("ref_log_probs").values)
    # In the first step the policy is still the one whose scores were dumped.
    np.testing.assert_allclose(
        result.ragged("kl").values[first_step & trained],
        expected[first_step & trained],
        rtol=1e-4,
        atol=1e-6,
    )
    assert result.steps[0]["train/kl"] == pytest.approx(
        expected[first_step & trained].mean(), rel=1e-4
    )
    assert result.steps[0]["train/kl"] > 1e-3
    assert ("train/full_entropy" in result.steps[0]) == ("full_scores" in algorithm)


def test_full_scores_are_those_without_replay(
    train: Train,
    make_recipe: MakeRecipe,
    reference_folder: Path,
    of_reference: Trained,
    batch: Batch,
    tmp_path: Path,
) -> None:
    without = train(
        make_recipe(tmp_path / "run", {"data": 1}, rollout={"replay": False}),
        reference_folder,
        batch,
        warm_start=False,
    )
    sampled = of_reference.ragged("nucleus_status").values != 2
    for full, score in (("full_log_probs", "log_probs"), ("full_entropy", "entropy")):
        np.testing.assert_allclose(
            of_reference.ragged(full).values[sampled],
            without.ragged(score).values[sampled],
            rtol=0,
            atol=1e-5,
        )
    assert of_reference.steps[0]["train/full_entropy"] > of_reference.steps[0]["train/entropy"]


@pytest.mark.parametrize(
    "parallel",
    [{"data": 1, "tensor": 2}, {"data": 1, "pipeline": 2}, {"data": 2, "context": 2}],
    ids=["tp2", "pp2", "cp2dp2"],
)
def test_a_full_kl_term_is_the_same_in_all_layouts(
    parallel: dict[str, int],
    train: Train,
    make_recipe: MakeRecipe,
    model_folder: Path,
    reference_folder: Path,
    batch: Batch,
    tmp_path: Path,
) -> None:
    one, many = (
        train(
            _recipe(
                make_recipe,
                tmp_path / name,
                reference_folder,
                {**FULL, "entropy_coef": 0.01},
                layout,
            ),
            model_folder,
            batch,
        )
        for name, layout in (("one", {"data": 1}), ("many", parallel))
    )
    for name in ("log_probs", "full_log_probs", "ref_log_probs"):
        np.testing.assert_allclose(
            many.ragged(name).values, one.ragged(name).values, rtol=0, atol=1e-5
        )
    # The second step follows an update by Adam, which turns rounding of tiny gradients into
    # differences of its own.
    for step, expected, tolerance in zip(many.steps, one.steps, (1e-4, 1e-3), strict=True):
        assert step == pytest.approx(expected, rel=tolerance, abs=1e-6)
