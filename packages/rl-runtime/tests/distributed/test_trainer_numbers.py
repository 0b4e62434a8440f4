"""What the trainer computes.

The log-probs of transformers, reports that are means of what is dumped, old log-probs of all kinds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rl_topp import NucleusSet
from rl_topp.reference import nucleus_scores

if TYPE_CHECKING:
    from distributed.conftest import Batch, MakeRecipe, RunRanks, Train, Trained

pytestmark = pytest.mark.distributed

FAMILIES = {"qwen2": False, "qwen3": True, "llama": False}
"""Model types, and whether the embeddings are tied."""
ODD_VOCAB_SIZE = 89
"""One id more than the batch's tokens come from.

Padded for two tensor ranks; the padding must not count.
"""
LAYOUTS = {"tp2": {"data": 1, "tensor": 2}, "pp2": {"data": 1, "pipeline": 2}}


def test_the_ratio_starts_at_one_and_the_second_step_has_moved(single: Trained) -> None:
    first, second = single.steps
    assert first["train/ratio"] == pytest.approx(1, abs=1e-6)
    assert first["train/clip_fraction"] == 0
    assert abs(second["train/ratio"] - 1) > 1e-5


def test_dumped_log_probs_have_full_length_and_are_over_the_nucleus(single: Trained) -> None:
    lengths = single.scalars("response_lengths")
    for name in ("log_probs", "entropy", "advantages"):
        assert np.array_equal(single.ragged(name).lengths, lengths)
    status = single.ragged("nucleus_status").values
    offsets = single.ragged("nucleus_offsets")
    singletons = (status == 0) & (
        np.concatenate([np.diff(offsets[row]) for row in range(len(offsets))]) == 1
    )
    assert singletons.any()
    log_probs = single.ragged("log_probs").values
    assert np.array_equal(log_probs[singletons], np.zeros(singletons.sum(), np.float32))
    assert not log_probs[status == 2].any()


def test_the_reported_gap_is_the_mean_difference_over_trained_tokens(single: Trained) -> None:
    gaps = np.abs(single.ragged("log_probs").values - single.ragged("rollout_log_probs").values)
    step_of_token = np.repeat(single.scalars("step"), single.scalars("response_lengths"))
    trained = single.ragged("loss_masks").values == 1
    for number, step in enumerate(single.steps):
        assert step["train/log_prob_gap"] == pytest.approx(
            gaps[trained & (step_of_token == number)].mean(), rel=1e-5
        )


def _write_family(folder: Path, family: str, *, tied: bool) -> Any:
    """Random weights of a small model of another family, as transformers makes them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=ODD_VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=10000.0,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        **({"head_dim": 16} if family == "qwen3" else {}),
    )
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4 if "norm" not in name else 1).add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="session")
def transformers_logits(
    run_ranks: RunRanks, batch: Batch, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[npt.NDArray[np.float64]]]]:
    """Per family: its folder and, per sample, the logits that predict the response.

    By transformers, in eager float32.
    """
    folder = tmp_path_factory.mktemp("families")
    tokens, masks = batch.ragged["tokens"], batch.ragged["loss_masks"]

    def rank_main(rank: int, rendezvous: str) -> dict[str, list[npt.NDArray[np.float64]]]:
        found = {}
        for family, tied in FAMILIES.items():
            model = _write_family(folder / family, family, tied=tied)
            with torch.no_grad():
                found[family] = [
                    model(torch.from_numpy(tokens[i].copy())[None])
                    .logits[0, -masks[i].size - 1 : -1]
                    .double()
                    .numpy()
                    for i in range(len(tokens))
                ]
        return found

    (logits,) = run_ranks(1, rank_main)
    return {family: (folder / family, logits[family]) for family in FAMILIES}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(
    family: str,
    layout: str,
    transformers_logits: dict[str, tuple[Path, list[npt.NDArray[np.float64]]]],
    train: Train,
    make_recipe: MakeRecipe,
    batch: Batch,
    tmp_path: Path,
) -> None:
    folder, logits = transformers_logits[family]
    result = train(make_recipe(tmp_path / "run", LAYOUTS[layout]), folder, batch, warm_start=False)
    for row, position in enumerate(result.scalars("rollout_position")):
        ids, offsets, status = (
            batch.ragged[f"nucleus_{name}"][position] for name in ("ids", "offsets", "status")
        )
        nucleus = NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=ODD_VOCAB_SIZE)
        expected = nucleus_scores(
            logits[position], batch.ragged["tokens"][position][-len(nucleus) :], nucleus
        )
        np.testing.assert_allclose(
            result.ragged("log_probs")[row], expected.log_probs, rtol=0, atol=1e-4
        )
        np.testing.assert_allclose(
            result.ragged("entropy")[row], expected.entropy, rtol=0, atol=1e-4
        )


def test_reuse_takes_the_training_forward_as_old_log_probs(
    train: Train, make_recipe: MakeRecipe, model_folder: Path, batch: Batch, tmp_path: Path
) -> None:
    """With one step per batch, reuse and recompute are the same update and the same dump."""
    rollouts = int(batch.scalars["rollout_ids"].max()) + 1
    sections: dict[str, object] = {
        "train": {"global_batch_size": rollouts},
        "rollout": {"prompts_per_batch": rollouts, "rollouts_per_prompt": 1},
    }
    recomputed, reused = (
        train(
            make_recipe(tmp_path / how, {"data": 2}, **sections, algorithm={"old_log_probs": how}),
            model_folder,
            batch,
        )
        for how in ("recompute", "reuse")
    )
    assert np.array_equal(reused.ragged("log_probs").values, recomputed.ragged("log_probs").values)
    assert reused.steps[0]["train/grad_norm"] == pytest.approx(
        recomputed.steps[0]["train/grad_norm"], rel=1e-6
    )


def test_without_replay_the_gap_is_that_of_the_whole_vocabulary(
    single: Trained,
    train: Train,
    make_recipe: MakeRecipe,
    model_folder: Path,
    batch: Batch,
    tmp_path: Path,
) -> None:
    recipe = make_recipe(tmp_path / "run", {"data": 1}, rollout={"replay": False})
    result = train(recipe, model_folder, batch)
    assert (result.ragged("log_probs").values <= single.ragged("log_probs").values + 1e-5).all()
    assert result.steps[0]["train/log_prob_gap"] > single.steps[0]["train/log_prob_gap"] + 0.5
