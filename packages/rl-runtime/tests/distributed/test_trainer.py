"""The trainer on real gloo: the same numbers in every layout, and those of transformers."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from rl_dump import RaggedArray, open_dump
from rl_metrics import rollout_denominators
from rl_runtime.batch import RankBatch, take_columns
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import BatchMismatchError, ConfigError, RuntimeSetupError, TrainerError
from rl_runtime.tiny_model import write_tiny_model
from rl_runtime.training.trainer import Trainer
from rl_schedule import build_dp_schedule
from rl_topp import NucleusSet
from rl_topp.reference import nucleus_scores

pytestmark = pytest.mark.distributed

MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
VOCAB_SIZE = 88
GLOBAL_BATCH_SIZE = 8
NUM_ROLLOUTS = 17  # the last one does not fill a step
TOKEN_CAP = 64

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


def _recipe(run_dir: Path, parallel, **sections):
    base = {"run": {"dir": str(run_dir)}, "model": MODEL, "parallel": parallel, "train": {"global_batch_size": GLOBAL_BATCH_SIZE}}
    return Recipe.model_validate(base | sections)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, Recipe.model_validate({"model": MODEL}).model, rng=3)
    # Weights that are larger than a fresh start's, and norms other than 1, make mistakes visible.
    generator = np.random.default_rng(5)
    path = folder / "model.safetensors"
    weights = {
        name: (generator.uniform(0.5, 1.5, array.shape) if "norm" in name else array * 8).astype(np.float32)
        for name, array in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def _sample(generator, rollout):
    prompt, response = int(generator.integers(2, 12)), int(generator.integers(1, 11))
    tokens = generator.integers(0, VOCAB_SIZE, prompt + response)
    mask = (generator.random(response) < 0.8).astype(np.int32)
    kept, status = [], []
    for position in range(response):
        # Every kind of token: kept set, sampled without a filter, not sampled (never trained).
        kind = 2 if mask[position] == 0 and position % 2 else int(position % 5 == 4)
        others = generator.integers(0, VOCAB_SIZE, int(generator.integers(0, 8)))
        kept.append(np.unique([*others, tokens[prompt + position]]) if kind == 0 else np.zeros(0, int))
        status.append(kind)
    return {
        "tokens": tokens,
        "loss_masks": mask,
        "rollout_ids": rollout,
        "group_ids": rollout // 4,
        "rollout_log_probs": -generator.random(response),
        "nucleus_ids": np.concatenate(kept),
        "nucleus_offsets": np.cumsum([0, *map(len, kept)]),
        "nucleus_status": np.array(status),
    }


@pytest.fixture(scope="session")
def columns():
    """One synthetic batch: 17 rollouts of 1 + (i mod 3) siblings, masks with holes, one rollout without trained tokens."""
    generator = np.random.default_rng(7)
    samples = [_sample(generator, rollout) for rollout in range(NUM_ROLLOUTS) for _ in range(1 + rollout % 3)]
    for sample in samples:
        if sample["rollout_ids"] == 3:
            sample["loss_masks"][:] = 0
    dtypes = {
        "tokens": np.int64,
        "loss_masks": np.int32,
        "rollout_log_probs": np.float32,
        "nucleus_ids": np.int32,
        "nucleus_offsets": np.int64,
        "nucleus_status": np.uint8,
    }
    masks = [sample["loss_masks"] for sample in samples]
    rollout_ids = np.array([sample["rollout_ids"] for sample in samples])
    advantage_of_rollout = generator.standard_normal(NUM_ROLLOUTS)
    return {
        **{name: RaggedArray.from_list([sample[name] for sample in samples], dtype) for name, dtype in dtypes.items()},
        "rollout_position": np.arange(len(samples)),
        "sample_index": np.arange(len(samples)),
        "rollout_ids": rollout_ids,
        "group_ids": np.array([sample["group_ids"] for sample in samples]),
        "total_lengths": np.array([sample["tokens"].size for sample in samples]),
        "response_lengths": np.array([mask.size for mask in masks]),
        "rewards": advantage_of_rollout[rollout_ids],
        "raw_reward": generator.random(len(samples)),
        "loss_denominators": rollout_denominators(masks, rollout_ids).astype(np.float32),
    }


def _rank_batch(columns, parallel, dp_rank, *, batch_id=0, global_batch_size=GLOBAL_BATCH_SIZE):
    cp_size = parallel.get("context", 1)
    plan = build_dp_schedule(
        total_lengths=columns["total_lengths"],
        rollout_ids=columns["rollout_ids"],
        global_batch_size=global_batch_size,
        dp_size=parallel["data"],
        cp_size=cp_size,
        max_tokens_per_gpu=TOKEN_CAP // cp_size,
        pad_to_multiple=2 * cp_size,
    )
    view = plan.rank_view(dp_rank)
    return RankBatch(
        batch_id=batch_id,
        plan=view,
        columns=take_columns(columns, view.partition),
        step_units=np.array(plan.global_batch_sizes, np.int64),
    )


def _train(run_ranks, recipe, model_folder: Path, columns, *, warm_start=True):
    """One supervised step (unless `warm_start` is off), one batch of two policy steps, weights before and after, and the train dump."""
    parallel = recipe.parallel.model_dump()

    def rank_main(rank: int, rendezvous):
        trainer = Trainer(recipe, rank=rank, world_size=recipe.parallel.world_size, rendezvous=rendezvous, model_folder=model_folder)
        dp_rank = trainer.data_parallel_rank
        examples = {name: columns[name] for name in ("tokens", "loss_masks")}
        mine = np.arange(dp_rank, len(columns["rewards"]), recipe.parallel.data)
        before = trainer.export_weights()
        supervised = trainer.train_sft_step(take_columns(examples, mine), 1e-4) if warm_start else {}
        trainer.start_reinforcement()
        batch = _rank_batch(columns, parallel, dp_rank, global_batch_size=recipe.train.global_batch_size)
        steps = trainer.train_batch(batch, 1e-3)
        after = trainer.export_weights()
        trainer.save_hf(recipe.run.dir / "export")
        trainer.close()
        return before, supervised, steps, after

    results = run_ranks(recipe.parallel.world_size, rank_main)
    _, supervised, steps, _ = results[0]
    for _, other_supervised, other_steps, _ in results:
        assert _without_speed(supervised) == _without_speed(other_supervised)
        assert [_without_speed(step) for step in steps] == [_without_speed(step) for step in other_steps]
    (before,) = (weights for weights, *_ in results if weights is not None)
    (after,) = (weights for *_, weights in results if weights is not None)
    dump = open_dump(recipe.run.dir / "dumps" / "train_0.parquet")
    return SimpleNamespace(before=before, supervised=supervised, steps=steps, after=after, dump=dump)


def _without_speed(report):
    return {name: value for name, value in report.items() if "second" not in name}


@pytest.fixture(scope="session")
def single(run_ranks, model_folder: Path, columns, tmp_path_factory: pytest.TempPathFactory):
    """The result of one process, which every layout must give."""
    return _train(run_ranks, _recipe(tmp_path_factory.mktemp("single") / "run", {"data": 1}), model_folder, columns)


def _assert_same(result, expected) -> None:
    for name in ("rollout_position", "response_lengths"):
        assert np.array_equal(result.dump.column(name), expected.dump.column(name))
    for name in ("log_probs", "entropy", "rollout_log_probs", "advantages", "returns"):
        np.testing.assert_allclose(result.dump.column(name).values, expected.dump.column(name).values, rtol=0, atol=LOG_PROB_TOLERANCE)
    assert result.supervised["warm_start/grad_norm"] == pytest.approx(expected.supervised["warm_start/grad_norm"], rel=FIRST_STEP_TOLERANCE)
    assert len(result.steps) == len(expected.steps)
    for step, expected_step in zip(result.steps, expected.steps, strict=True):
        assert _without_speed(step) == pytest.approx(_without_speed(expected_step), rel=FIRST_STEP_TOLERANCE, abs=1e-6)
    for name, weight in expected.after.items():
        np.testing.assert_allclose(result.after[name], weight, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_log_probs_gradient_norms_and_weights_of_one_process(
    layout: str, single, run_ranks, model_folder: Path, columns, tmp_path: Path
) -> None:
    _assert_same(_train(run_ranks, _recipe(tmp_path / "run", LAYOUTS[layout]), model_folder, columns), single)


def test_sequence_parallelism_and_recomputation_change_nothing(single, run_ranks, model_folder: Path, columns, tmp_path: Path) -> None:
    megatron = {"sequence_parallel": True, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recipe = _recipe(tmp_path / "run", {"data": 1, "tensor": 2, "context": 2}, megatron=megatron)
    _assert_same(_train(run_ranks, recipe, model_folder, columns), single)


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}},
        {"algorithm": {"loss_aggregation": "token_mean"}},
        {"algorithm": {"old_log_probs": "rollout"}},
    ],
    ids=["kl and entropy", "token mean", "engine's log-probs as old"],
)
def test_every_loss_is_the_same_in_all_layouts(sections, run_ranks, model_folder: Path, columns, tmp_path: Path) -> None:
    if "loss_aggregation" in sections["algorithm"]:
        columns = {name: column for name, column in columns.items() if name != "loss_denominators"}
    one = _train(run_ranks, _recipe(tmp_path / "one", {"data": 1}, **sections), model_folder, columns)
    many = _train(run_ranks, _recipe(tmp_path / "many", {"data": 2, "context": 2}, **sections), model_folder, columns)
    for step, expected in zip(many.steps, one.steps, strict=True):
        assert _without_speed(step) == pytest.approx(_without_speed(expected), rel=FIRST_STEP_TOLERANCE, abs=1e-6)


def test_the_ratio_starts_at_one_and_the_second_step_has_moved(single) -> None:
    first, second = single.steps
    assert first["train/ratio"] == pytest.approx(1, abs=1e-6)
    assert first["train/clip_fraction"] == 0
    assert abs(second["train/ratio"] - 1) > 1e-5


def test_dumped_log_probs_have_full_length_and_are_kept_set_log_probs(single, columns) -> None:
    dump = single.dump
    lengths = dump.column("response_lengths")
    for name in ("log_probs", "entropy", "advantages"):
        assert np.array_equal(dump.column(name).lengths, lengths)
    kept = dump.column("nucleus_status").values == 0
    singletons = kept & (np.concatenate([np.diff(offsets) for offsets in dump.column("nucleus_offsets")]) == 1)
    assert singletons.any()
    assert np.array_equal(dump.column("log_probs").values[singletons], np.zeros(singletons.sum(), np.float32))
    assert not dump.column("log_probs").values[dump.column("nucleus_status").values == 2].any()


def test_the_reported_gap_is_the_mean_difference_over_trained_tokens(single) -> None:
    dump = single.dump
    gaps = np.abs(dump.column("log_probs").values - dump.column("rollout_log_probs").values)
    step_of_token = np.repeat(dump.column("step"), dump.column("response_lengths"))
    trained = dump.column("loss_masks").values == 1
    for number, step in enumerate(single.steps):
        assert step["train/log_prob_gap"] == pytest.approx(gaps[trained & (step_of_token == number)].mean(), rel=1e-5)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "tp2pp2"])
def test_loading_then_exporting_returns_the_same_bits(layout: str, run_ranks, model_folder: Path, columns, tmp_path: Path) -> None:
    result = _train(run_ranks, _recipe(tmp_path / "run", LAYOUTS[layout]), model_folder, columns)
    original = load_file(model_folder / "model.safetensors")
    assert result.before.keys() == original.keys()
    for name, array in original.items():
        assert result.before[name].tobytes() == array.tobytes(), name
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    for name, array in result.after.items():
        assert exported[name].tobytes() == array.tobytes(), name
    assert (tmp_path / "run" / "export" / "tokenizer.json").exists()


FAMILIES = {"qwen2": False, "qwen3": True, "llama": False}
"""Model types, and whether the embeddings are tied."""
ODD_VOCAB_SIZE = VOCAB_SIZE + 1
"""Padded for two tensor ranks; the padding must not count."""


def _write_family(folder: Path, family, *, tied):
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
def transformers_logits(run_ranks, columns, tmp_path_factory: pytest.TempPathFactory):
    """Per family: its folder and, per sample, the logits that predict the response, by transformers in eager float32."""
    folder = tmp_path_factory.mktemp("families")

    def rank_main(rank: int, rendezvous):
        found = {}
        for family, tied in FAMILIES.items():
            model = _write_family(folder / family, family, tied=tied)
            with torch.no_grad():
                found[family] = [
                    model(torch.from_numpy(tokens.copy())[None]).logits[0, -mask.size - 1 : -1].double().numpy()
                    for tokens, mask in zip(columns["tokens"], columns["loss_masks"], strict=True)
                ]
        return found

    (logits,) = run_ranks(1, rank_main)
    return {family: (folder / family, logits[family]) for family in FAMILIES}


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(family, layout: str, transformers_logits, run_ranks, columns, tmp_path: Path) -> None:
    folder, logits = transformers_logits[family]
    result = _train(run_ranks, _recipe(tmp_path / "run", LAYOUTS[layout]), folder, columns, warm_start=False)
    for row, position in enumerate(result.dump.column("rollout_position")):
        ids, offsets, status = (columns[f"nucleus_{name}"][position] for name in ("ids", "offsets", "status"))
        kept = NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=ODD_VOCAB_SIZE)
        expected = nucleus_scores(logits[position], columns["tokens"][position][-len(kept) :], kept)
        np.testing.assert_allclose(result.dump.column("log_probs")[row], expected.log_probs, rtol=0, atol=1e-4)
        np.testing.assert_allclose(result.dump.column("entropy")[row], expected.entropy, rtol=0, atol=1e-4)


def test_reuse_takes_the_training_forward_as_old_log_probs(run_ranks, model_folder: Path, columns, tmp_path: Path) -> None:
    """With one step per batch, reuse and recompute are the same update, and the dump holds the same log-probs."""
    sections = {"train": {"global_batch_size": NUM_ROLLOUTS}, "rollout": {"prompts_per_batch": NUM_ROLLOUTS, "rollouts_per_prompt": 1}}
    reuse = {**sections, "algorithm": {"old_log_probs": "reuse"}}
    results = [
        _train(run_ranks, _recipe(tmp_path / name, {"data": 2}, **given), model_folder, columns)
        for name, given in (("recompute", sections), ("reuse", reuse))
    ]
    recomputed, reused = results
    assert np.array_equal(reused.dump.column("log_probs").values, recomputed.dump.column("log_probs").values)
    assert reused.steps[0]["train/grad_norm"] == pytest.approx(recomputed.steps[0]["train/grad_norm"], rel=1e-6)


def test_without_replay_the_gap_is_that_of_the_whole_vocabulary(single, run_ranks, model_folder: Path, columns, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path / "run", {"data": 1}, rollout={"replay": False})
    result = _train(run_ranks, recipe, model_folder, columns)
    assert (result.dump.column("log_probs").values <= single.dump.column("log_probs").values + 1e-5).all()
    assert result.steps[0]["train/log_prob_gap"] > single.steps[0]["train/log_prob_gap"] + 0.5


def test_reuse_refuses_a_plan_of_several_steps(run_ranks, model_folder: Path, columns, tmp_path: Path) -> None:
    sections = {"train": {"global_batch_size": NUM_ROLLOUTS}, "rollout": {"prompts_per_batch": NUM_ROLLOUTS, "rollouts_per_prompt": 1}}
    recipe = _recipe(tmp_path / "run", {"data": 1}, algorithm={"old_log_probs": "reuse"}, **sections)

    def rank_main(rank: int, rendezvous) -> None:
        trainer = Trainer(recipe, rank=rank, world_size=1, rendezvous=rendezvous, model_folder=model_folder)
        trainer.start_reinforcement()
        with pytest.raises(TrainerError, match="2 steps"):
            trainer.train_batch(_rank_batch(columns, {"data": 1}, 0), 1e-3)
        trainer.close()

    run_ranks(1, rank_main)


def test_ranks_with_different_plans_all_raise(run_ranks, model_folder: Path, columns, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path / "run", {"data": 2})

    def rank_main(rank: int, rendezvous):
        trainer = Trainer(recipe, rank=rank, world_size=2, rendezvous=rendezvous, model_folder=model_folder)
        trainer.start_reinforcement()
        batch = _rank_batch(columns, recipe.parallel.model_dump(), rank)
        if rank:
            batch = dataclasses.replace(batch, plan=dataclasses.replace(batch.plan, digest="ab" * 32))
        with pytest.raises(BatchMismatchError) as raised:
            trainer.train_batch(batch, 1e-3)
        trainer.close()
        return batch.plan.digest, str(raised.value)

    (first, message), (second, other) = run_ranks(2, rank_main)
    assert message == other
    assert first in message
    assert second in message


def test_tensor_ranks_with_different_columns_all_raise(run_ranks, model_folder: Path, columns, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path / "run", {"data": 1, "tensor": 2})

    def rank_main(rank: int, rendezvous) -> None:
        trainer = Trainer(recipe, rank=rank, world_size=2, rendezvous=rendezvous, model_folder=model_folder)
        trainer.start_reinforcement()
        given = {**columns, "rewards": columns["rewards"] + rank}
        with pytest.raises(BatchMismatchError, match="columns of one data-parallel rank"):
            trainer.train_batch(_rank_batch(given, recipe.parallel.model_dump(), 0), 1e-3)
        trainer.close()

    run_ranks(2, rank_main)


def test_methods_out_of_order_are_refused(run_ranks, model_folder: Path, columns, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path / "run", {"data": 1})

    def rank_main(rank: int, rendezvous) -> None:
        trainer = Trainer(recipe, rank=rank, world_size=1, rendezvous=rendezvous, model_folder=model_folder)
        with pytest.raises(TrainerError, match="before start_reinforcement"):
            trainer.train_batch(_rank_batch(columns, {"data": 1}, 0), 1e-3)
        nothing = {"tokens": columns["tokens"], "loss_masks": RaggedArray(columns["loss_masks"].values * 0, columns["loss_masks"].offsets)}
        with pytest.raises(TrainerError, match="no token"):
            trainer.train_sft_step(nothing, 1e-3)
        trainer.start_reinforcement()
        for call in (trainer.start_reinforcement, lambda: trainer.train_sft_step(nothing, 1e-3)):
            with pytest.raises(TrainerError):
                call()
        trainer.close()

    run_ranks(1, rank_main)


def test_a_gradient_that_is_no_number_leaves_the_weights_alone(run_ranks, model_folder: Path, columns, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path / "run", {"data": 1})

    def rank_main(rank: int, rendezvous):
        trainer = Trainer(recipe, rank=rank, world_size=1, rendezvous=rendezvous, model_folder=model_folder)
        trainer.start_reinforcement()
        before = trainer.export_weights()
        batch = _rank_batch({**columns, "rewards": columns["rewards"] * 1e38}, {"data": 1}, 0)
        with pytest.raises(TrainerError, match="gradient norm"):
            trainer.train_batch(batch, 1e-3)
        after = trainer.export_weights()
        trainer.close()
        return all(np.array_equal(before[name], after[name]) for name in before)

    assert run_ranks(1, rank_main) == [True]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"parallel": {"data": 1, "tensor": 3}}, "parallel.tensor = 3 does not divide num_attention_heads = 4"),
        ({"parallel": {"data": 1, "pipeline": 3}}, "parallel.pipeline = 3 does not divide num_hidden_layers = 4"),
        ({"megatron": {"recompute_granularty": "full"}}, "did you mean recompute_granularity"),
        ({"megatron": {"num_layers": 2}}, "megatron.num_layers is decided"),
        ({"megatron": {"sequence_parallel": True}}, "needs parallel.tensor > 1"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(sections, words, model_folder: Path, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, **({"parallel": {"data": 1}} | sections))
    with pytest.raises(ConfigError, match=words):
        Trainer(recipe, rank=0, world_size=1, rendezvous="127.0.0.1:1", model_folder=model_folder)


def test_a_folder_that_lacks_a_tensor_is_named(run_ranks, model_folder: Path, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path / "run", {"data": 1})
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy2(model_folder / "config.json", folder)
    weights = load_file(model_folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")

    def rank_main(rank: int, rendezvous) -> None:
        with pytest.raises(RuntimeSetupError, match=r"no tensor named model\.norm\.weight"):
            Trainer(recipe, rank=rank, world_size=1, rendezvous=rendezvous, model_folder=folder)

    run_ranks(1, rank_main)
