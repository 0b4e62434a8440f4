"""Archives of torch are read without it: every layout of a tensor, slime's dumps, ours."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stubs.dump_batches import Columns, batch, equal, items_of, numbers_of, rollout_columns
from typer.testing import CliRunner

from rl_dump import (
    DumpError,
    RaggedArray,
    UnsupportedContractError,
    WriteError,
    convert,
    doctor,
    open_dump,
    write_dump,
)
from rl_dump.archive.pickle_machine import run_pickle
from rl_dump.archive.tensors import archive_globals, storage_of
from rl_dump.atomic import atomic_path
from rl_dump.cli.app import app
from rl_dump.columns.tagged_json import Tensor
from rl_dump.torch import write_torch_archive


def train_file(path: Path, samples: list[dict[str, Any]], **top: Any) -> Path:
    torch.save(
        {
            "format_version": 2,
            "rollout_id": 3,
            "rank": 0,
            "samples": samples,
            "dp_shards": [],
            **top,
        },
        path / "x.pt",
    )
    return path / "x.pt"


def one(path: Path, value: object) -> Any:
    with open_dump(train_file(path, [{"x": value}])) as dump:
        return dump.sample(0)["x"]


BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE.t(),
        BASE[1:3],
        BASE[::2, 1::3],
        BASE[:, 2],
        BASE[0],
        torch.zeros(1).expand(5),
        torch.empty(0),
        torch.empty(0, 3),
        BASE.clone().requires_grad_(),
        torch.nn.Parameter(BASE.clone()),
        *(
            torch.tensor([0, 1, 1]).to(dtype)
            for dtype in (
                torch.uint8,
                torch.int8,
                torch.int16,
                torch.int32,
                torch.int64,
                torch.bool,
                torch.uint16,
                torch.uint32,
                torch.uint64,
            )
        ),
        *(
            torch.tensor([0.5, -3.25, float("inf")]).to(dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        ),
    ],
)
def test_every_layout_and_dtype_reads_as_torch_reads_it(
    tmp_path: Path, tensor: torch.Tensor
) -> None:
    found = one(tmp_path, tensor)
    expected = (
        tensor.detach().float().numpy()
        if tensor.dtype == torch.bfloat16
        else tensor.detach().numpy()
    )
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


def test_tensors_that_share_a_storage_read_right(tmp_path: Path) -> None:
    flat = torch.arange(10)
    samples = [{"x": flat[:3]}, {"x": flat[3:10]}, {"x": flat[2:4]}, {"x": flat}]
    with open_dump(train_file(tmp_path, samples)) as dump:
        assert [item.tolist() for item in dump.column("x")] == [
            sample["x"].tolist() for sample in samples
        ]


def test_zero_dimensional_tensors_are_numbers(tmp_path: Path) -> None:
    samples = [{"rollout_mask_sums": torch.tensor(float(value))} for value in (3, 4)]
    with open_dump(train_file(tmp_path, samples)) as dump:
        found = numbers_of(dump, "loss_denominators")
        assert found.dtype == np.float32
        assert found.tolist() == [3.0, 4.0]
        assert dump.fields["loss_denominators"].form == "tensor"


def test_nested_values_none_and_numpy_come_as_they_are(tmp_path: Path) -> None:
    value = {
        "pixels": torch.ones(2, 3, dtype=torch.bfloat16),
        "ids": [torch.tensor([1, 2])],
        "n": None,
        "array": np.arange(3, dtype=np.int16),
        "o": OrderedDict(a=1),
    }
    found = one(tmp_path, value)
    assert found["pixels"] == Tensor(np.ones((2, 3), np.float32), "bfloat16")
    assert found["ids"][0] == Tensor(np.array([1, 2]), "int64")
    assert found["n"] is None
    assert found["array"].dtype == np.int16
    assert found["o"] == {"a": 1}


@pytest.mark.parametrize("value", [np.float64(1.5), np.int32(3), np.bool_(True)])
def test_numpy_scalars_are_numbers(tmp_path: Path, value: np.generic) -> None:
    with open_dump(train_file(tmp_path, [{"x": value}, {"x": value}])) as dump:
        assert numbers_of(dump, "x").dtype == value.dtype
        assert dump.column("x")[0] == value
        assert dump.fields["x"].form == "generic"


def test_numpy_arrays_are_columns(tmp_path: Path) -> None:
    samples = [
        {"x": np.arange(3, dtype=np.int16)},
        {"x": np.asfortranarray(np.arange(4, dtype=np.int16))},
    ]
    with open_dump(train_file(tmp_path, samples)) as dump:
        assert dump.column("x") == RaggedArray.from_list(
            [sample["x"] for sample in samples], np.int16
        )
        assert dump.fields["x"].form == "array"


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


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda path: torch.save(
                {"rollout_id": 0, "samples": []}, path, _use_new_zipfile_serialization=False
            ),
            "legacy format",
        ),
        (lambda path: path.write_bytes(b""), "empty file"),
        (lambda path: path.write_bytes(b"hello world"), "not a torch archive"),
        (lambda path: torch.save([1, 2], path), "a torch archive, but not a dump: it holds list"),
        (
            lambda path: torch.save({"weights": torch.ones(1)}, path),
            r"a torch archive, but not a dump: it holds \['weights'\]",
        ),
        (lambda path: torch.save({"samples": [3], "rollout_id": 0}, path), "sample 0 is a int"),
        (lambda path: torch.save({"samples": [{"a": 1}]}, path), "rollout_id None"),
        (
            lambda path: torch.save({"samples": [], "format_version": 1, "rollout_id": 0}, path),
            "format_version 1",
        ),
        (
            lambda path: torch.save(
                {"samples": [], "contract": "train-dump.v9", "rollout_id": 0}, path
            ),
            "train-dump.v9",
        ),
        (
            lambda path: torch.save(
                {"samples": [{"x": torch.ones(2).to_sparse()}], "rollout_id": 0}, path
            ),
            "torch._utils._rebuild_sparse_tensor",
        ),
        (
            lambda path: torch.save({"samples": [{"x": torch.float32}], "rollout_id": 0}, path),
            "where data should be",
        ),
        (
            lambda path: torch.save(
                {"samples": [{"x": torch.nn.Linear(1, 1)}], "rollout_id": 0}, path
            ),
            "torch.nn.modules.linear.Linear",
        ),
        (lambda path: torch.jit.save(torch.jit.script(torch.nn.Identity()), path), "TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files_that_are_no_dumps_are_refused_in_one_line(
    tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    write(tmp_path / "x.pt")
    with pytest.raises((DumpError, UnsupportedContractError), match=message) as failure:
        open_dump(tmp_path / "x.pt")
    assert "\n" not in str(failure.value)
    assert "x.pt" in str(failure.value)


def test_a_flipped_bit_in_a_tensor_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    path = write_torch_archive(
        tmp_path / "a.pt", contract="train-dump.v2", batch_id=5, columns=batch(6)
    )
    data = bytearray(path.read_bytes())
    at = data.index(batch(6)["log_probs"].values.tobytes()) + 5
    data[at] ^= 1
    path.write_bytes(data)
    with open_dump(path) as dump:
        dump.column("tokens")
        with pytest.raises(DumpError, match=r"field log_probs: .* does not match its checksum"):
            dump.column("log_probs")
        assert [problem.code for problem in dump.verify()] == ["damaged"]


def test_files_without_checksums_can_be_opened_on_request(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = train_file(tmp_path, [{"x": torch.arange(5)}])
    finally:
        torch.serialization.set_crc32_options(True)
    with open_dump(path, check_sums=False) as dump:
        assert dump.column("x")[0].tolist() == [0, 1, 2, 3, 4]


def test_a_view_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    path = train_file(tmp_path, [{"x": torch.arange(500)}])
    with zipfile.ZipFile(path) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    pickled = next(name for name in entries if name.endswith("data.pkl"))
    entries[pickled] = entries[pickled].replace(b"K\x00M\xf4\x01\x85", b"K\x09M\xf4\x01\x85")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for name, data in entries.items():
            target.writestr(name, data)
    path.write_bytes(buffer.getvalue())
    with (
        open_dump(path) as dump,
        pytest.raises(DumpError, match="reaches element 508 of a storage of 500"),
    ):
        dump.column("x")


def test_rollout_columns_round_trip(tmp_path: Path) -> None:
    columns = rollout_columns(batch(5))
    archive = write_torch_archive(
        tmp_path / "r.pt", contract="rollout-dump.v1", batch_id="eval_1", columns=columns
    )
    with open_dump(archive) as dump:
        assert dump.column("prompt") == columns["prompt"]
        assert dump.column("metadata") == columns["metadata"]
        assert dump.batch_id == "eval_1"


def test_reading_whole_tensors_by_pattern_changes_nothing(tmp_path: Path) -> None:
    path = write_torch_archive(
        tmp_path / "a.pt", contract="train-dump.v2", batch_id=5, columns=batch(40)
    )
    with zipfile.ZipFile(path) as file:
        data = file.read("archive/data.pkl")
    options: dict[str, Any] = {
        "known": archive_globals(),
        "persistent_load": storage_of,
        "where": "f",
    }
    assert run_pickle(data, **options) == run_pickle(data, patterns=False, **options)


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


def test_response_lengths_that_are_no_numbers_are_a_problem_of_verify(tmp_path: Path) -> None:
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_with_the_systems_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: Columns
) -> None:
    @contextlib.contextmanager
    def full(target: Path) -> Iterator[Path]:
        with atomic_path(target) as temporary:
            temporary.symlink_to("/dev/full")
            yield temporary

    monkeypatch.setattr("rl_dump.torch.archive.atomic_path", full)
    with pytest.raises(WriteError, match=r"cannot write .*x\.pt: No space left on device"):
        write_torch_archive(
            tmp_path / "x.pt", contract="train-dump.v2", batch_id=0, columns=columns
        )
    assert list(tmp_path.iterdir()) == []
