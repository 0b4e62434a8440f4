"""The quick start with its real engines: it learns, and what it leaves behind holds together."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from rl_dump import Dump, RaggedArray, compare, join, open_dump
from rl_runtime.tracking.tracker import read_metrics
from rl_schedule import SchedulePlan

if TYPE_CHECKING:
    from e2e.conftest import Launcher

Batch = tuple[int, Dump, Dump, SchedulePlan]
"""(batch id, rollout dump, train dump, plan)."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(params=[0, 1], ids=["batch 0", "batch 1"])
def batch(request: pytest.FixtureRequest, quick_start: Path) -> Batch:
    number = request.param
    rollout, train = (
        open_dump(quick_start / "dumps" / f"{side}_{number}.parquet")
        for side in ("rollout", "train")
    )
    plan = SchedulePlan.from_document(
        json.loads((quick_start / "plans" / f"plan_{number}.json").read_text())
    )
    return number, rollout, train, plan


def ragged(dump: Dump, name: str) -> RaggedArray:
    """A column of one array per sample."""
    column = dump.column(name)
    assert isinstance(column, RaggedArray)
    return column


def per_sample(dump: Dump, name: str) -> npt.NDArray[Any]:
    """A column of one value per sample."""
    column = dump.column(name)
    assert isinstance(column, np.ndarray)
    return column


def test_it_learns(quick_start: Path) -> None:
    """Held-out scores rise by less than 0.03 when nothing is learned, at a rate of 1e-12."""
    evaluations = [line for line in read_metrics(quick_start) if "eval/exact_match" in line]
    first, last = evaluations[0], evaluations[-1]
    assert last["eval/reward_mean"] - first["eval/reward_mean"] > 0.1
    assert last["eval/exact_match"] - first["eval/exact_match"] > 0.12


def test_trainer_and_engine_agree_on_batch_0(quick_start: Path) -> None:
    first = next(line for line in read_metrics(quick_start) if "train/log_prob_gap" in line)
    assert (first["batch"], first["step"]) == (0, 0)
    assert first["train/log_prob_gap"] <= 1e-4


def test_held_out_scores_are_there_before_the_first_batch_and_after_the_last(
    quick_start: Path,
) -> None:
    evaluations = [line for line in read_metrics(quick_start) if "eval/exact_match" in line]
    assert [line["batch"] for line in evaluations] == [0, 10, 20]
    assert all("eval/reward_mean" in line for line in evaluations)


def test_every_batch_was_sampled_by_the_weights_of_the_batch_before(quick_start: Path) -> None:
    dumps = [open_dump(quick_start / "dumps" / f"rollout_{number}.parquet") for number in (0, 1)]
    versions = [np.unique(ragged(dump, "weight_versions").values) for dump in dumps]
    assert [version.size for version in versions] == [1, 1]
    assert versions[1][0] == versions[0][0] + 1
    assert all(
        line["rollout/staleness_batches"] == 0
        for line in read_metrics(quick_start)
        if "rollout/staleness_batches" in line
    )


def test_the_dumps_join_on_every_sample(batch: Batch) -> None:
    _, rollout, train, _ = batch
    joined = join(rollout, train)
    assert not joined.missing_in_rollout
    assert not joined.missing_in_train
    assert len(joined.pairs) == rollout.num_samples == train.num_samples
    assert not rollout.verify()
    assert not train.verify()


def test_every_rollouts_samples_are_in_one_step_and_where_the_plan_puts_them(batch: Batch) -> None:
    _, _, train, plan = batch
    step_of_rollout: dict[int, set[int]] = {}
    for rollout, step in zip(
        per_sample(train, "rollout_ids"), per_sample(train, "step"), strict=True
    ):
        step_of_rollout.setdefault(int(rollout), set()).add(int(step))
    assert all(len(steps) == 1 for steps in step_of_rollout.values())
    for rank, partition in enumerate(plan.partitions):
        mine = np.flatnonzero(per_sample(train, "data_parallel_rank") == rank)
        assert sorted(per_sample(train, "rollout_position")[mine].tolist()) == sorted(
            partition.tolist()
        )


def test_the_fan_out_is_one_plus_i_mod_three(batch: Batch) -> None:
    _, rollout, _, _ = batch
    ids, counts = np.unique(per_sample(rollout, "rollout_ids"), return_counts=True)
    assert counts.tolist() == [1 + int(rollout_id) % 3 for rollout_id in ids]


def test_every_nucleus_holds_the_sampled_id(batch: Batch) -> None:
    _, rollout, _, _ = batch
    sizes = []
    for row in range(0, rollout.num_samples, 7):
        sample = rollout.sample(row)
        response = sample["tokens"][-sample["response_lengths"] :]
        for token, start, stop in zip(
            response, sample["nucleus_offsets"][:-1], sample["nucleus_offsets"][1:], strict=True
        ):
            assert token in sample["nucleus_ids"][start:stop]
            sizes.append(stop - start)
    assert max(sizes) > 1


def test_the_dumped_log_probs_are_the_ones_that_the_loss_used(
    batch: Batch, quick_start: Path
) -> None:
    number, _, train, _ = batch
    # The first step's report is over the samples of that step, under the weights that the batch
    # began with.
    line = next(
        line
        for line in read_metrics(quick_start)
        if line["batch"] == number and "train/log_prob_gap" in line
    )
    mask, in_first_step = ragged(train, "loss_masks"), per_sample(train, "step") == 0
    gap = np.abs(ragged(train, "log_probs").values - ragged(train, "rollout_log_probs").values)
    first = np.repeat(in_first_step, mask.lengths) & (mask.values == 1)
    assert np.unique(per_sample(train, "rollout_ids")[in_first_step]).size == 256
    assert line["train/log_prob_gap"] == pytest.approx(
        gap[first].astype(np.float64).mean(), rel=1e-4
    )
    assert line["train/ratio"] == pytest.approx(1.0, abs=1e-5)


def test_a_run_leaves_models_report_and_recipe(quick_start: Path) -> None:
    for name in (
        "warm_start/model.safetensors",
        "warm_start/tokenizer.json",
        "final/model.safetensors",
        "report.html",
        "recipe.toml",
    ):
        assert (quick_start / name).stat().st_size > 0, name


def test_a_micro_batch_of_batch_0_replays_with_the_warm_start(
    quick_start: Path, tmp_path: Path
) -> None:
    def command(name: str, *arguments: object) -> tuple[int, str]:
        program = Path(sys.executable).with_name(name)
        done = subprocess.run(
            [program, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    one = tmp_path / "one.parquet"
    for step, rank in ((0, 0), (1, 1)):
        code, output = command(
            "rl-dump",
            "replay",
            quick_start / "dumps" / "train_0.parquet",
            one,
            "--step",
            step,
            "--rank",
            rank,
        )
        assert code == 0, output
        code, output = command("rl-runtime", "replay", one, "--model", quick_start / "warm_start")
        assert code == 0, output
        assert f"batch 0, step {step}, rank {rank}, micro-batch 0" in output
    code, output = command("rl-runtime", "replay", one, "--model", quick_start / "final")
    assert code == 1, output
    assert "differs by more than 1e-05" in output


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_another_layout_gives_the_same_log_probs_and_gradient_norm(
    axis: str, launch: Launcher, quick_start: Path, one_rank_run: Path
) -> None:
    def trained(folder: Path) -> tuple[float, npt.NDArray[Any], npt.NDArray[Any]]:
        norm = next(
            line["train/grad_norm"] for line in read_metrics(folder) if "train/grad_norm" in line
        )
        dump = open_dump(folder / "dumps" / "train_0.parquet")
        return norm, per_sample(dump, "rollout_position"), ragged(dump, "log_probs").values

    run = launch(axis, *_replay(quick_start), "parallel.data=1", f"parallel.{axis}=2")
    assert run.wait(240) == 0, run.text()[-3000:]
    norm, positions, log_probs = trained(run.folder)
    reference_norm, reference_positions, reference = trained(one_rank_run)
    np.testing.assert_array_equal(positions, reference_positions)
    np.testing.assert_allclose(log_probs, reference, atol=1e-5)
    assert norm == pytest.approx(reference_norm, rel=1e-4)


def test_two_train_only_runs_from_one_dump_are_the_same_bits(
    launch: Launcher, quick_start: Path, one_rank_run: Path
) -> None:
    run = launch("again", *_replay(quick_start))
    assert run.wait(240) == 0, run.text()[-3000:]

    def numbers(folder: Path) -> list[dict[str, Any]]:
        # What is measured with a clock is not computed from the batch.
        clocks = ("time", "second")
        return [
            {
                name: value
                for name, value in line.items()
                if not any(word in name for word in clocks)
            }
            for line in read_metrics(folder)
        ]

    assert numbers(run.folder) == numbers(one_rank_run)
    assert sum("train/loss" in line for line in numbers(run.folder)) == 2
    dumps = [folder / "dumps" / "train_0.parquet" for folder in (run.folder, one_rank_run)]
    with open_dump(dumps[0]) as mine, open_dump(dumps[1]) as other:
        assert compare(mine, other) is None
        for name in ("log_probs", "advantages", "entropy"):
            assert ragged(mine, name).values.tobytes() == ragged(other, name).values.tobytes()
    weights = [
        (folder / "final" / "model.safetensors").read_bytes()
        for folder in (run.folder, one_rank_run, quick_start)
    ]
    assert hashlib.sha256(weights[0]).digest() == hashlib.sha256(weights[1]).digest()
    assert hashlib.sha256(weights[0]).digest() != hashlib.sha256(weights[2]).digest(), (
        "the longer run has other weights"
    )


@pytest.fixture(scope="session")
def one_rank_run(launch: Launcher, quick_start: Path) -> Path:
    """The default layout, two data-parallel ranks, from the same warm start and rollout dump."""
    run = launch("default", *_replay(quick_start))
    assert run.wait(240) == 0, run.text()[-3000:]
    return run.folder


def _replay(quick_start: Path) -> tuple[str, ...]:
    return (
        "train.num_batches=1",
        f"model.path={quick_start / 'warm_start'}",
        f"debug.load_rollout_dump={quick_start / 'dumps' / 'rollout_0.parquet'}",
    )
