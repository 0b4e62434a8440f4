"""Dumps in archives: slime's under the contract's names, ours the same as in Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stubs.dump_archives import train_file
from stubs.dump_batches import Columns, batch, equal, items_of, numbers_of, rollout_columns
from typer.testing import CliRunner

from rl_dump import (
    DumpError,
    RaggedArray,
    convert,
    doctor,
    open_dump,
    write_dump,
)
from rl_dump.cli.app import app
from rl_dump.columns.tagged_json import Tensor
from rl_dump.torch import write_torch_archive


def test_a_slime_train_dump_reads_under_the_contracts_names(tmp_path: Path) -> None:
    samples = [
        {
            "data_parallel_rank": 0,
            "sample_index": None if position else 7,
            "rollout_position": position,
            "tokens": torch.arange(5),
            "total_lengths": 5,
            "response_lengths": 3,
            "loss_masks": torch.ones(3, dtype=torch.int32),
            "rewards": 1.0,
            "truncated": 0,
            "rollout_ids": position,
            "rollout_mask_sums": torch.tensor(3.0),
            "log_probs": torch.randn(3),
            "rollout_top_p_token_ids": torch.tensor([1, 2, 3, 4], dtype=torch.int32),
            "rollout_top_p_token_offsets": torch.tensor([0, 1, 2, 4], dtype=torch.int32),
            "source_names": "math",
            "round_number": 2,
        }
        for position in range(2)
    ]
    shard = {
        "rank": 0,
        "data_parallel_rank": 0,
        "sample_indices": [7, None],
        "partition": [0, 1],
        "micro_batch_indices": [[0, 1]],
        "num_microbatches": [1],
        "global_batch_sizes": [2],
    }
    with open_dump(train_file(tmp_path, samples, dp_shards=[shard], raw_reward=[0.5, 1.0])) as dump:
        assert (dump.contract, dump.batch_id, dump.num_samples) == ("train-dump.v2", 3, 2)
        assert dump.dp_shards == [shard]
        assert dump.raw_reward == [0.5, 1.0]
        assert dump.column("sample_index") == [7, None]
        assert dump.column("nucleus_ids")[0].tolist() == [1, 2, 3, 4]
        assert items_of(dump, "nucleus_offsets").dtype == np.int64
        assert numbers_of(dump, "loss_denominators").tolist() == [3.0, 3.0]
        assert dump.column("source_names") == ["math", "math"]
        assert dump.fields["log_probs"].response_aligned
        assert dump.verify() == []
        converted = convert(dump.path, tmp_path / "y.parquet")
    with open_dump(converted) as dump:
        assert np.array_equal(dump.column("log_probs")[1], np.asarray(samples[1]["log_probs"]))
        assert dump.header["producer"]["distribution"] == "slime"


def slime_sample(**change: Any) -> dict[str, Any]:
    sample = {
        "group_index": 0,
        "index": 4,
        "rollout_id": 1,
        "prompt": [{"role": "user", "content": "1+1?"}],
        "tokens": [1, 2, 3],
        "response": "2.",
        "response_length": 2,
        "label": "2",
        "reward": 1,
        "loss_mask": [1, 0],
        "weight_versions": ["7"],
        "rollout_log_probs": [-0.5, 0.0],
        "rollout_top_p_token_ids": None,
        "remove_sample": False,
        "status": "truncated",
        "metadata": {"k": [1, {"z": None}]},
        "spec_info": {"accept_token_num": 0},
        "trace": {"t": 1.5},
    }
    return {**sample, **change}


def test_a_slime_rollout_dump_reads_under_the_contracts_names(tmp_path: Path) -> None:
    torch.save(
        {
            "rollout_id": "eval_3",
            "samples": [
                slime_sample(),
                slime_sample(index=5, loss_mask=None, reward=0.5, status="completed"),
            ],
        },
        tmp_path / "r.pt",
    )
    with open_dump(tmp_path / "r.pt") as dump:
        assert (dump.contract, dump.batch_id) == ("rollout-dump.v1", "eval_3")
        assert numbers_of(dump, "sample_index").tolist() == [4, 5]
        assert numbers_of(dump, "rollout_position").tolist() == [0, 1]
        assert numbers_of(dump, "raw_reward").tolist() == [1.0, 0.5]
        assert dump.column("loss_masks")[0].tolist() == [1, 0]
        assert dump.column("loss_masks")[1] is None
        assert dump.column("rollout_log_probs")[0].dtype == np.float32
        assert numbers_of(dump, "truncated").tolist() == [True, False]
        assert dump.column("finish_reason") == ["length", "stop"]
        assert dump.column("metadata")[0] == {"k": [1, {"z": None}]}
        assert dump.column("trace") == [{"t": 1.5}] * 2
        assert dump.column("weight_versions") == [["7"]] * 2


def test_rewards_of_several_parts_keep_their_name(tmp_path: Path) -> None:
    torch.save(
        {"rollout_id": 0, "samples": [slime_sample(reward={"format": 1.0}), slime_sample()]},
        tmp_path / "r.pt",
    )
    with open_dump(tmp_path / "r.pt") as dump:
        assert dump.column("reward") == [{"format": 1.0}, 1]
        assert "raw_reward" not in dump.fields


def test_float_lists_that_need_double_precision_keep_it(tmp_path: Path) -> None:
    torch.save(
        {"rollout_id": 0, "samples": [slime_sample(rollout_log_probs=[-0.1, 0.0])]},
        tmp_path / "r.pt",
    )
    with open_dump(tmp_path / "r.pt") as dump:
        assert dump.column("rollout_log_probs")[0].tolist() == [-0.1, 0.0]


def test_our_archive_and_our_parquet_read_the_same(tmp_path: Path) -> None:
    columns = batch(12)
    header: dict[str, Any] = {
        "contract": "train-dump.v2",
        "batch_id": 5,
        "dp_shards": [{"rank": 0, "partition": list(range(12))}],
        "raw_reward": [1.0],
        "metadata": {"a": (1, np.float32(2))},
    }
    parquet = write_dump(tmp_path / "a.parquet", columns=columns, **header)
    archive = write_torch_archive(tmp_path / "a.pt", columns=columns, **header)
    with open_dump(parquet) as first, open_dump(archive) as second:
        assert list(first.fields) == list(second.fields)
        for name in columns:
            assert equal(first.column(name), second.column(name)), name
        for row in (0, 11):
            one_sample, other = first.sample(row), second.sample(row)
            assert list(one_sample) == list(other)
            assert all(
                np.array_equal(one_sample[name], other[name])
                and type(one_sample[name]) is type(other[name])
                for name in one_sample
            )
        skipped = {"fields", "row_groups", "checksums"}
        assert {key: value for key, value in first.header.items() if key not in skipped} == {
            key: value for key, value in second.header.items() if key not in skipped
        }
        assert second.verify() == []


def test_other_tools_load_our_archive(tmp_path: Path) -> None:
    columns = batch(6)
    path = write_torch_archive(
        tmp_path / "a.pt", contract="train-dump.v2", batch_id=5, columns=columns
    )
    root = torch.load(path, weights_only=True)
    assert (root["format_version"], root["rollout_id"], len(root["samples"])) == (2, 5, 6)
    assert torch.equal(root["samples"][2]["tokens"], torch.from_numpy(columns["tokens"][2].copy()))
    assert root["samples"][2]["tokens"].dtype == torch.int64
    assert isinstance(root["samples"][2]["total_lengths"], int)


def test_empty_tensors_of_several_types_can_stand_in_one_archive(tmp_path: Path) -> None:
    empty = {
        name: np.zeros(0, dtype)
        for name, dtype in (("a", np.float32), ("b", np.float64), ("c", np.int64))
    }
    nested = {name: Tensor(array, array.dtype.name) for name, array in empty.items()}
    columns: Columns = {
        **{
            name: RaggedArray.from_list([array, array], array.dtype)
            for name, array in empty.items()
        },
        "label": [nested, None],
    }
    with open_dump(
        write_torch_archive(
            tmp_path / "e.pt", contract="train-dump.v2", batch_id=0, columns=columns
        )
    ) as dump:
        assert {name: items_of(dump, name).dtype for name in empty} == {
            name: array.dtype for name, array in empty.items()
        }
        assert dump.column("label") == [nested, None]


def test_bfloat16_stays_bfloat16_through_both_containers(tmp_path: Path) -> None:
    samples = [{"x": torch.randn(3).bfloat16()}, {"x": torch.randn(2).bfloat16()}]
    first = convert(train_file(tmp_path, samples), tmp_path / "y.parquet")
    with open_dump(first) as dump:
        assert (dump.fields["x"].dtype, dump.fields["x"].stored) == ("bfloat16", "float32")
        assert items_of(dump, "x").dtype == np.float32
    again = torch.load(convert(first, tmp_path / "z.pt"), weights_only=True)
    assert all(
        torch.equal(sample["x"], other["x"]) and other["x"].dtype == torch.bfloat16
        for sample, other in zip(samples, again["samples"], strict=True)
    )


def test_rollout_columns_round_trip(tmp_path: Path) -> None:
    columns = rollout_columns(batch(5))
    archive = write_torch_archive(
        tmp_path / "r.pt", contract="rollout-dump.v1", batch_id="eval_1", columns=columns
    )
    with open_dump(archive) as dump:
        assert dump.column("prompt") == columns["prompt"]
        assert dump.column("metadata") == columns["metadata"]
        assert dump.batch_id == "eval_1"


def test_text_that_parquet_cannot_hold_is_shown_and_not_converted(tmp_path: Path) -> None:
    path = tmp_path / "r.pt"
    torch.save({"samples": [slime_sample(), slime_sample(prompt="a\ud800")], "rollout_id": 1}, path)
    found = CliRunner().invoke(app, ["show", str(path), "--sample", "1"])
    assert (found.exit_code, "a\\ud800" in found.output) == (0, True)
    assert (
        json.loads(CliRunner().invoke(app, ["show", str(path), "--sample", "1", "--json"]).output)[
            "prompt"
        ]
        == "a\ud800"
    )
    with pytest.raises(DumpError, match="prompt of sample 1: holds the lone surrogate"):
        convert(path, tmp_path / "r.parquet")


def test_response_lengths_that_are_not_numbers_are_a_problem_of_verify(tmp_path: Path) -> None:
    path = tmp_path / "r.pt"
    torch.save({"samples": [slime_sample(response_length="two")], "rollout_id": 1}, path)
    with open_dump(path) as dump:
        assert any(
            "response_lengths: must hold one whole number" in problem.message
            for problem in dump.verify()
        )


def test_positions_in_a_tensor_are_positions(tmp_path: Path) -> None:
    samples = [
        {
            "tokens": torch.tensor([1, 2]),
            "total_lengths": 2,
            "response_lengths": 1,
            "rollout_position": 4,
        }
    ]
    path = train_file(
        tmp_path, samples, dp_shards=[{"data_parallel_rank": 0, "partition": torch.tensor([4, 5])}]
    )
    with open_dump(path) as dump:
        assert [alarm.code for alarm in doctor(dump)] == ["incomplete"]
