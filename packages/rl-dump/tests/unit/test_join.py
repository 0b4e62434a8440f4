"""Joining: the cases of a run, by name, and what is said of samples that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stubs.dump_batches import Columns, Pair, batch, placed, ragged, rollout_columns, taken

from rl_dump import (
    DumpError,
    Join,
    UnsupportedContractError,
    export_micro_batch,
    join,
    open_dump,
    write_dump,
)


def joined(folder: Path, rollout: Columns, train: Columns, **header: Any) -> Join:
    first = write_dump(
        folder / "r.parquet", contract="rollout-dump.v1", batch_id=0, columns=rollout
    )
    second = write_dump(
        folder / "t.parquet", contract="train-dump.v2", batch_id=0, columns=train, **header
    )
    with open_dump(first) as left, open_dump(second) as right:
        return join(left, right)


def without(columns: Columns, *names: str) -> Columns:
    return {name: column for name, column in columns.items() if name not in names}


def test_a_permuted_train_dump_is_joined_by_position(tmp_path: Path, columns: Columns) -> None:
    order = np.random.default_rng(0).permutation(24)
    result = joined(tmp_path, rollout_columns(columns), taken(columns, order))
    assert [(pair.rollout_row, pair.train_row, pair.method) for pair in result.pairs] == [
        (int(row), at, "position") for at, row in enumerate(order)
    ]
    assert not result.missing_in_rollout
    assert not result.missing_in_train


def test_the_permutation_that_moved_rewards_to_other_samples_is_joined_right(
    tmp_path: Path,
) -> None:
    """Four samples, permuted [2, 0, 3, 1]: a join by row would move every reward."""
    columns = batch(4)
    order = np.array([2, 0, 3, 1])
    result = joined(tmp_path, rollout_columns(columns), taken(columns, order))
    assert [pair.rollout_row for pair in result.pairs] == order.tolist()


def test_dropped_samples_carry_the_noted_reason(tmp_path: Path, columns: Columns) -> None:
    dropped = [
        {
            "rollout_position": 5,
            "sample_index": None,
            "rollout_id": 3,
            "reason": "does not fill a step",
        },
        {"rollout_position": None, "sample_index": 1007, "reason": "too long"},
    ]
    keep = [row for row in range(24) if row not in {5, 7}]
    result = joined(tmp_path, rollout_columns(columns), taken(columns, keep), dropped=dropped)
    assert [
        (entry.row, entry.rollout_position, entry.sample_index, entry.reason)
        for entry in result.missing_in_train
    ] == [
        (5, 5, 1005, "dropped: does not fill a step"),
        (7, 7, 1007, "dropped: too long"),
    ]


def test_a_schedule_or_a_lost_shard_explains_what_is_missing(
    tmp_path: Path, columns: Columns
) -> None:
    placed_columns, shards = placed(columns)
    keep = np.flatnonzero((placed_columns["data_parallel_rank"] == 0) & (np.arange(24) != 2))
    schedule = {
        "contract": "schedule-plan.v1",
        "arrays": {"dropped_samples": {"dtype": "int64", "shape": [1], "data": [2]}},
    }
    shards[0]["partition"].remove(2)
    result = joined(
        tmp_path,
        rollout_columns(columns),
        taken(placed_columns, keep),
        dp_shards=shards,
        schedule=schedule,
    )
    reasons = {entry.rollout_position: entry.reason for entry in result.missing_in_train}
    assert reasons[2] == "dropped by the schedule"
    assert (
        reasons[3]
        == "in the partition of data-parallel rank 1, but that shard's sample is not in the file"
    )


def test_a_dropped_sample_has_the_reason_of_the_plan_and_its_siblings_that_of_their_rollout(
    tmp_path: Path, columns: Columns
) -> None:
    """Rollout 1 has two samples; the first is too long, so both are dropped; 23 fills no step."""
    ids = np.array([0, 1, 1, *range(2, 23)])
    columns = {**columns, "rollout_ids": ids}
    plan: dict[str, Any] = {
        "contract": "schedule-plan.v1",
        "minor": 0,
        "settings": {
            "global_batch_size": 21,
            "max_tokens_per_gpu": 30,
            "cp_size": 2,
            "on_oversized": "drop",
        },
        "arrays": {"dropped_samples": {"data": [1, 2, 23]}, "oversized_samples": {"data": [1]}},
    }
    kept = taken(columns, [row for row in range(24) if row not in {1, 2, 23}])
    cap = "the 60 tokens that a micro-batch may hold"
    found = joined(tmp_path, rollout_columns(columns), kept, schedule=plan)
    assert {entry.rollout_position: entry.reason for entry in found.missing_in_train} == {
        1: f"dropped by the schedule: longer than {cap}",
        2: f"dropped by the schedule: a sample of its rollout is longer than {cap}",
        23: "dropped by the schedule: its rollout does not fill a step of 21 rollouts",
    }
    noted = [{"rollout_position": 1, "reason": "the reward timed out"}]
    found = joined(tmp_path, rollout_columns(columns), kept, schedule=plan, dropped=noted)
    reasons = {entry.rollout_position: entry.reason for entry in found.missing_in_train}
    assert reasons[1] == "dropped: the reward timed out"


def test_a_plan_of_another_major_is_refused_by_its_name_and_the_files(
    tmp_path: Path, columns: Columns
) -> None:
    with pytest.raises(UnsupportedContractError, match=r"t\.parquet: schedule: .*'other\.v2'"):
        joined(tmp_path, rollout_columns(columns), columns, schedule={"contract": "other.v2"})


def test_a_sample_removed_from_a_rollout_dump_without_positions_moves_nothing(
    tmp_path: Path, columns: Columns
) -> None:
    keep = [row for row in range(24) if row != 4]
    rollout = without(taken(rollout_columns(columns), keep), "rollout_position")
    result = joined(tmp_path, rollout, columns)
    assert {pair.train_row: keep[pair.rollout_row] for pair in result.pairs} == {
        row: row for row in keep
    }
    assert [entry.row for entry in result.missing_in_rollout] == [4]
    assert "is another one" in result.missing_in_rollout[0].reason


def test_without_any_ids_tokens_decide_and_equal_tokens_are_left_open(tmp_path: Path) -> None:
    tokens = ragged([[1, 2], [3, 4], [3, 4], [5]], np.int64)
    rollout = {"tokens": tokens, "rollout_position": [None] * 4}
    train = {"tokens": tokens.take([3, 2, 1, 0])}
    result = joined(tmp_path, rollout, train)
    found = {(pair.rollout_row, pair.train_row) for pair in result.pairs}
    assert {(0, 3), (3, 0)} <= found
    assert all(
        tokens[left].tolist() == tokens.take([3, 2, 1, 0])[right].tolist() for left, right in found
    )


def test_siblings_of_a_fan_out_that_share_an_index_are_told_apart_by_tokens(tmp_path: Path) -> None:
    tokens = ragged([[1], [2], [3]], np.int64)
    shared = {"sample_index": [7, 7, 8]}
    train = {
        "tokens": tokens.take([1, 0, 2]),
        "sample_index": [7, 7, 8],
        "rollout_position": [None] * 3,
    }
    result = joined(tmp_path, {"tokens": tokens, **shared}, train)
    assert {(pair.rollout_row, pair.train_row) for pair in result.pairs} == {(0, 1), (1, 0), (2, 2)}


def test_other_tokens_at_the_same_position_are_not_a_pair_and_the_reason_says_where(
    tmp_path: Path, columns: Columns
) -> None:
    changed = [item.copy() for item in columns["tokens"]]
    changed[3][2] += 1
    result = joined(
        tmp_path, rollout_columns(columns), {**columns, "tokens": ragged(changed, np.int64)}
    )
    assert len(result.pairs) == 23
    assert (
        result.missing_in_rollout[0].reason
        == "the sample of the same position is another one: its tokens differ from token 2 on"
    )


def test_an_unknown_sample_is_missing_on_either_side(tmp_path: Path, columns: Columns) -> None:
    result = joined(
        tmp_path, taken(rollout_columns(columns), range(20)), taken(columns, range(4, 24))
    )
    assert [entry.rollout_position for entry in result.missing_in_train] == [0, 1, 2, 3]
    assert [entry.rollout_position for entry in result.missing_in_rollout] == [20, 21, 22, 23]
    assert (
        "holds no sample at position 20 or with sample_index 1020"
        in result.missing_in_rollout[0].reason
    )


def test_swapped_or_unrelated_dumps_are_refused(
    tmp_path: Path, pair: Pair, columns: Columns
) -> None:
    with open_dump(pair[0]) as rollout, open_dump(pair[1]) as train:
        with pytest.raises(DumpError, match="rollout dump first, train dump second"):
            join(train, rollout)
        other = write_dump(
            tmp_path / "o.parquet", contract="train-dump.v2", batch_id=9, columns=columns
        )
        with (
            open_dump(other) as second,
            pytest.raises(DumpError, match=r"is batch 0, .* is batch 9"),
        ):
            join(rollout, second)


def test_samples_that_cannot_be_told_apart_are_called_ambiguous_on_both_sides(
    tmp_path: Path,
) -> None:
    same: Columns = {
        "rollout_position": np.array([0, 0, 1]),
        "tokens": ragged([[1], [1], [2]], np.int64),
    }
    rollout = write_dump(
        tmp_path / "r.parquet", contract="rollout-dump.v1", batch_id=0, columns=same
    )
    train = write_dump(tmp_path / "t.parquet", contract="train-dump.v2", batch_id=0, columns=same)
    single = write_dump(
        tmp_path / "s.parquet", contract="train-dump.v2", batch_id=0, columns=taken(same, [0, 2])
    )
    with open_dump(rollout) as first, open_dump(train) as second, open_dump(single) as third:
        found = join(first, second)
        assert [(pair.rollout_row, pair.train_row) for pair in found.pairs] == [(2, 2)]
        for missing in (*found.missing_in_rollout, *found.missing_in_train):
            assert (
                missing.reason
                == "ambiguous: 2 there, 2 here have this position, and nothing else tells them"
                " apart"
            )
        found = join(first, third)
        assert [missing.reason[:27] for missing in found.missing_in_rollout] == [
            "ambiguous: 2 there, 1 here "
        ]
        assert [missing.reason[:27] for missing in found.missing_in_train] == [
            "ambiguous: 1 there, 2 here "
        ] * 2


def test_samples_outside_of_an_exported_micro_batch_are_not_said_to_be_unaccounted_for(
    tmp_path: Path, pair: Pair
) -> None:
    with open_dump(pair[1]) as dump:
        path = export_micro_batch(
            dump, tmp_path / "one.parquet", step=0, data_parallel_rank=1, micro_batch=2
        )
    with open_dump(pair[0]) as rollout, open_dump(path) as one:
        found = join(rollout, one)
        assert len(found.pairs) == one.num_samples
        assert {missing.reason for missing in found.missing_in_train} == {
            "the train dump is an export of one micro-batch, and this sample is not in that"
        }
