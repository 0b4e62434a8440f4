"""Archives of torch are read without it: every layout of a tensor, and nothing hostile."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stubs.dump_archives import train_file
from stubs.dump_batches import Columns, batch, numbers_of

from rl_dump import (
    DumpError,
    RaggedArray,
    UnsupportedContractError,
    WriteError,
    open_dump,
)
from rl_dump.archive.pickle_machine import run_pickle
from rl_dump.archive.tensors import archive_globals, storage_of
from rl_dump.atomic import atomic_path
from rl_dump.columns.tagged_json import Tensor
from rl_dump.torch import write_torch_archive


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
def test_files_that_are_not_dumps_are_refused_in_one_line(
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


def test_a_small_archive_that_claims_34_gigabytes_is_refused(tmp_path: Path) -> None:
    """32 samples of 2**27 elements, all of them one element that is stored once."""
    wide = torch.zeros(1).expand(1 << 27)
    path = train_file(tmp_path, [{"x": wide}] * 32)
    assert path.stat().st_size < 2500
    with (
        open_dump(path) as dump,
        pytest.raises(DumpError, match=r"expand a file of \d+ bytes to 34359738368; refused"),
    ):
        dump.column("x")
