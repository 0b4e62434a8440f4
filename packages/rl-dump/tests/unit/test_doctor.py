"""Every alarm is raised by what it is for, and by nothing in a healthy batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from stubs.dump_batches import batch, placed, ragged

from rl_dump import Alarm, Thresholds, doctor, export_micro_batch, open_dump, write_dump

Columns = dict[str, Any]


def alarms(
    folder: Path, columns: Columns, thresholds: Thresholds | None = None, **header: Any
) -> dict[str, Alarm]:
    path = write_dump(
        folder / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns, **header
    )
    with open_dump(path) as dump:
        return {
            alarm.code: alarm
            for alarm in (doctor(dump) if thresholds is None else doctor(dump, thresholds))
        }


@pytest.fixture
def healthy(columns: Columns) -> Columns:
    masks = [np.maximum(mask, 1) for mask in columns["loss_masks"]]
    keep = [row for row, mask in enumerate(masks) if len(mask)]
    from stubs.dump_batches import taken

    return {
        **taken({**columns, "loss_masks": ragged(masks, np.int32)}, keep),
        "rollout_position": np.arange(len(keep)),
    }


def changed(
    columns: Columns, name: str, change: Callable[[list[npt.NDArray[Any]]], None]
) -> Columns:
    items = [item.copy() for item in columns[name]]
    change(items)
    return {**columns, name: ragged(items, columns[name].dtype)}


def test_a_healthy_batch_raises_none(tmp_path: Path, healthy: Columns) -> None:
    assert alarms(tmp_path, healthy) == {}


def test_a_value_that_is_not_finite_is_counted_and_its_sample_named(
    tmp_path: Path, healthy: Columns
) -> None:
    def change(items: list[npt.NDArray[Any]]) -> None:
        items[4][0] = np.nan

    found = alarms(tmp_path, changed(healthy, "advantages", change))["non-finite"]
    assert found.row == 4
    assert "1 in advantages" in found.message


def test_a_log_prob_gap_names_the_worst_sample(tmp_path: Path, healthy: Columns) -> None:
    def change(items: list[npt.NDArray[Any]]) -> None:
        items[:] = [item + np.float32(0.2) for item in items]
        items[6][0] += 3

    found = alarms(tmp_path, changed(healthy, "log_probs", change))["log-prob-gap"]
    assert found.row == 6
    few = alarms(
        tmp_path,
        changed(healthy, "log_probs", lambda items: items[6].__setitem__(0, 9.0)),
        Thresholds(mean_log_prob_gap=99.0),
    )
    assert "log-prob-gap" in few, (
        "one token with a gap no rounding explains is enough in a small batch"
    )


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


def test_truncated_dropped_and_equal_samples_raise_an_alarm_each(
    tmp_path: Path, healthy: Columns
) -> None:
    columns = {
        **healthy,
        "truncated": np.ones(len(healthy["truncated"]), bool),
        "advantages": ragged([item * 0 for item in healthy["advantages"]], np.float32),
    }
    found = alarms(tmp_path, columns, dropped=[{"rollout_position": 99, "reason": "too long"}] * 2)
    assert set(found) == {"truncated", "dropped", "no-signal"}
    assert found["truncated"].message.startswith("100% of the samples")
    assert "2 x too long" in found["dropped"].message


def masked(rollouts: list[int], trained: list[int], **changed: Any) -> Columns:
    """Samples of two response tokens; `trained` says which have trained tokens."""
    count = len(rollouts)
    return {
        "rollout_position": np.arange(count),
        "rollout_ids": np.array(rollouts),
        "loss_masks": ragged([[mark, 0] for mark in trained], np.int32),
        "advantages": ragged([[0.5, 0.5]] * count, np.float32),
        "truncated": np.zeros(count, bool),
        **changed,
    }


def test_a_masked_rollout_is_told_from_what_runs_mask_on_purpose(tmp_path: Path) -> None:
    found = alarms(tmp_path, masked([7, 8, 8, 9], [1, 0, 0, 0]))["fully-masked"]
    assert found.row == 1
    assert found.message.startswith(
        "2 rollouts (3 samples) have no trained token, though they were not cut off and have an"
        " advantage"
    )
    sibling = masked([7, 8, 8], [1, 0, 1])
    over_long = masked([7, 8], [1, 0], truncated=np.array([False, True]))
    no_advantage = masked([7, 8], [1, 0], advantages=ragged([[0.5, 0.5], [0, 0]], np.float32))
    for columns in (sibling, over_long, no_advantage):
        assert "fully-masked" not in alarms(tmp_path, columns, Thresholds(truncated_fraction=1.0))


def test_without_rollouts_advantages_and_truncation_every_masked_sample_counts(
    tmp_path: Path,
) -> None:
    columns = {"loss_masks": ragged([[1], [0], []], np.int32)}
    found = alarms(tmp_path, columns)["fully-masked"]
    assert (found.row, found.message.split(" have")[0]) == (1, "2 rollouts (2 samples)")
    empty = {**columns, "advantages": ragged([[1], [1], []], np.float32)}
    assert alarms(tmp_path, empty)["fully-masked"].message.startswith("2 rollouts"), (
        "an empty response is not without advantage, it is empty"
    )


def test_a_position_that_no_sample_has_makes_the_dump_incomplete(
    tmp_path: Path, healthy: Columns
) -> None:
    columns, shards = placed(
        {**healthy, "sample_index": np.arange(len(healthy["rollout_position"]))}
    )
    shards[1]["partition"].append(77)
    assert (
        "the first at rollout position 77"
        in alarms(tmp_path, columns, dp_shards=shards)["incomplete"].message
    )


def test_a_sampled_id_outside_of_its_kept_set_names_its_sample(
    tmp_path: Path, healthy: Columns
) -> None:
    row = next(row for row, item in enumerate(healthy["nucleus_ids"]) if len(item) and row > 2)

    def change(items: list[npt.NDArray[Any]]) -> None:
        items[row][:] = 999

    found = alarms(tmp_path, changed(healthy, "nucleus_ids", change))["outside-kept-set"]
    assert found.row == row


def test_a_micro_batch_on_its_own_raises_no_alarm_about_the_batch(tmp_path: Path) -> None:
    columns = batch(12, seed=1)
    lengths = columns["response_lengths"]
    columns |= {
        "truncated": np.ones(12, bool),
        "raw_reward": np.ones(12),
        "group_ids": np.zeros(12, np.int64),
        "advantages": ragged([np.zeros(length) for length in lengths], np.float32),
        "log_probs": columns["rollout_log_probs"],
    }
    columns, shards = placed(columns)
    whole = write_dump(
        tmp_path / "t.parquet",
        contract="train-dump.v2",
        batch_id=0,
        columns=columns,
        dp_shards=shards,
    )
    with open_dump(whole) as dump:
        assert {alarm.code for alarm in doctor(dump)} >= {
            "truncated",
            "zero-std-groups",
            "no-signal",
        }
        path = export_micro_batch(
            dump, tmp_path / "one.parquet", step=0, data_parallel_rank=1, micro_batch=0
        )
    with open_dump(path) as one:
        assert doctor(one) == []
