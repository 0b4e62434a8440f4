"""Every alarm is raised by what it is for, and by nothing in a healthy batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dump_batches import placed, ragged

from rl_dump import Thresholds, doctor, open_dump, write_dump


def alarms(folder: Path, columns, thresholds=None, **header):
    path = write_dump(folder / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns, **header)
    with open_dump(path) as dump:
        return {alarm.code: alarm for alarm in (doctor(dump) if thresholds is None else doctor(dump, thresholds))}


@pytest.fixture
def healthy(columns):
    masks = [np.maximum(mask, 1) for mask in columns["loss_masks"]]
    keep = [row for row, mask in enumerate(masks) if len(mask)]
    from dump_batches import taken

    return {**taken({**columns, "loss_masks": ragged(masks, np.int32)}, keep), "rollout_position": np.arange(len(keep))}


def changed(columns, name: str, change):
    items = [item.copy() for item in columns[name]]
    change(items)
    return {**columns, name: ragged(items, columns[name].dtype)}


def test_a_healthy_batch_raises_none(tmp_path: Path, healthy) -> None:
    assert alarms(tmp_path, healthy) == {}


def test_non_finite_values(tmp_path: Path, healthy) -> None:
    def change(items) -> None:
        items[4][0] = np.nan

    found = alarms(tmp_path, changed(healthy, "advantages", change))["non-finite"]
    assert found.row == 4
    assert "1 in advantages" in found.message


def test_a_log_prob_gap_names_the_worst_sample(tmp_path: Path, healthy) -> None:
    def change(items) -> None:
        items[:] = [item + np.float32(0.2) for item in items]
        items[6][0] += 3

    found = alarms(tmp_path, changed(healthy, "log_probs", change))["log-prob-gap"]
    assert found.row == 6
    few = alarms(tmp_path, changed(healthy, "log_probs", lambda items: items[6].__setitem__(0, 9.0)), Thresholds(mean_log_prob_gap=99.0))
    assert "log-prob-gap" in few, "one token with a gap no rounding explains is enough in a small batch"


def test_groups_that_teach_nothing_count_rollouts_once(tmp_path: Path) -> None:
    columns = {
        "group_ids": np.array([0, 0, 0, 1, 1]),
        "rollout_ids": np.array([0, 0, 1, 2, 3]),
        "raw_reward": np.array([1.0, 1.0, 0.0, 1.0, 1.0]),
    }
    found = alarms(tmp_path, columns, Thresholds(zero_std_fraction=0.4))
    assert "in 1 of 2 prompt groups" in found["zero-std-groups"].message
    assert alarms(tmp_path, columns) == {}


def test_rewards_of_the_whole_batch_serve_if_samples_have_none(tmp_path: Path) -> None:
    columns = {"group_ids": np.array([0, 0]), "rollout_position": np.array([2, 0])}
    assert "zero-std-groups" in alarms(tmp_path, columns, raw_reward=[1.0, 5.0, 1.0])


def test_truncation_dropping_masking_and_no_signal(tmp_path: Path, healthy) -> None:
    columns = {
        **healthy,
        "truncated": np.ones(len(healthy["truncated"]), bool),
        "loss_masks": ragged([mask * 0 for mask in healthy["loss_masks"]], np.int32),
        "advantages": ragged([item * 0 for item in healthy["advantages"]], np.float32),
    }
    found = alarms(tmp_path, columns, dropped=[{"rollout_position": 99, "reason": "too long"}] * 2)
    assert set(found) == {"truncated", "dropped", "fully-masked", "no-signal"}
    assert found["truncated"].message.startswith("100% of the samples")
    assert "2 x too long" in found["dropped"].message


def test_a_shard_that_is_missing(tmp_path: Path, healthy) -> None:
    columns, shards = placed({**healthy, "sample_index": np.arange(len(healthy["rollout_position"]))})
    shards[1]["partition"].append(77)
    assert "the first at rollout position 77" in alarms(tmp_path, columns, dp_shards=shards)["incomplete"].message


def test_a_sampled_id_outside_of_its_kept_set(tmp_path: Path, healthy) -> None:
    row = next(row for row, item in enumerate(healthy["nucleus_ids"]) if len(item) and row > 2)

    def change(items) -> None:
        items[row][:] = 999

    found = alarms(tmp_path, changed(healthy, "nucleus_ids", change))["outside-kept-set"]
    assert found.row == row
