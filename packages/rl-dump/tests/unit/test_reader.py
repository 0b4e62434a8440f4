"""Reading: rows, names, laziness, and what verify finds."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from stubs.dump_batches import Columns, Pair, placed, taken

from rl_dump import DumpError, Problem, UnsupportedContractError, open_dump, write_dump
from rl_dump.parquet.arrow_columns import CRC_KEY, HEADER_KEY


def test_samples_by_row_from_either_end(pair: Pair) -> None:
    with open_dump(pair[1]) as dump:
        last = dump.sample(-1)
        assert last["rollout_position"] == 23
        assert np.array_equal(last["tokens"], dump.column("tokens")[23])
        assert isinstance(last["rewards"], float)
        assert isinstance(last["truncated"], bool)
        for row in (24, -25):
            with pytest.raises(DumpError, match=rf"sample {row} asked of 24"):
                dump.sample(row)


def test_an_unknown_field_is_refused_naming_those_there_are(pair: Pair) -> None:
    with (
        open_dump(pair[1]) as dump,
        pytest.raises(DumpError, match="no field 'nope'; it has rollout_position, "),
    ):
        dump.column("nope")


def test_a_damaged_column_leaves_the_others_readable(pair: Pair) -> None:
    path = pair[1]
    group = pq.ParquetFile(path).metadata.row_group(0)
    column = next(
        group.column(index)
        for index in range(group.num_columns)
        if group.column(index).path_in_schema.startswith("entropy")
    )
    data = bytearray(path.read_bytes())
    data[column.dictionary_page_offset + column.total_compressed_size // 2] ^= 4
    path.write_bytes(data)
    with open_dump(path) as dump:
        assert len(dump.column("tokens")) == 24
        with pytest.raises(DumpError, match="field entropy"):
            dump.column("entropy")
        with pytest.raises(DumpError, match=r"entropy|row group 0"):
            dump.sample(0)
        assert [problem.code for problem in dump.verify()] == ["damaged"]


def test_the_name_says_what_it_is(pair: Pair) -> None:
    with open_dump(pair[1]) as dump:
        assert (
            repr(dump) == f"Dump({str(pair[1])!r}, train-dump.v2, batch 0, 24 samples, 24 fields)"
        )


def test_positions_are_rows_where_the_dump_holds_none(tmp_path: Path) -> None:
    path = write_dump(
        tmp_path / "x.parquet",
        contract="train-dump.v2",
        batch_id=0,
        columns={"rewards": np.zeros(3)},
    )
    with open_dump(path) as dump:
        assert dump.positions().tolist() == [0, 1, 2]


def problems(folder: Path, columns: Columns, **header: Any) -> dict[str, Problem]:
    path = write_dump(
        folder / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns, **header
    )
    with open_dump(path) as dump:
        return {problem.code: problem for problem in dump.verify()}


def test_verify_finds_what_is_inconsistent(tmp_path: Path, columns: Columns) -> None:
    columns, shards = placed(columns)
    assert problems(tmp_path, columns, dp_shards=shards) == {}
    assert (
        problems(tmp_path, taken(columns, [1, 0, *range(2, 24)]), dp_shards=shards)["order"].row
        == 1
    )
    twice = {**columns, "rollout_position": np.array([0, 0, *range(2, 24)])}
    found = problems(tmp_path, twice, dp_shards=shards)
    assert found["duplicate-position"].message == "rollout_position 0 stands 2 times"
    assert (
        "rollout_position 1 is in a shard's partition, but not in the dump (1 such)"
        in found["shard-missing"].message
    )
    shards[0]["partition"] = shards[0]["partition"][:-1]
    assert set(problems(tmp_path, columns, dp_shards=shards)) == {"shard-extra"}
    assert set(problems(tmp_path, columns, dropped=[{"rollout_position": 3, "reason": "x"}])) == {
        "dropped-and-trained"
    }


def test_a_folder_is_answered_with_the_dumps_in_it(tmp_path: Path) -> None:
    with pytest.raises(DumpError) as refused:
        open_dump(tmp_path)
    assert str(refused.value) == f"{tmp_path}: a folder, and there is no .parquet or .pt file in it"
    dumps = tmp_path / "dumps"
    for name in (
        "train_1.parquet",
        "train_0.parquet",
        "old.pt",
        "rollout_0.parquet",
        "rollout_1.parquet",
    ):
        dumps.mkdir(exist_ok=True)
        (dumps / name).touch()
    listed = ", ".join(
        str(dumps / name)
        for name in ("old.pt", "rollout_0.parquet", "rollout_1.parquet", "train_0.parquet")
    )
    for folder in (tmp_path, dumps):
        with pytest.raises(DumpError) as refused:
            open_dump(folder)
        assert (
            str(refused.value) == f"{folder}: a folder; give one of its files: {listed} and 1 more"
        )


@pytest.mark.parametrize("suffix", [".parquet", ".pt"])
def test_a_pipe_or_device_is_refused_before_it_is_opened(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"null{suffix}").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        with pytest.raises(DumpError, match="a pipe, device or socket; a dump is a regular file"):
            open_dump(tmp_path / f"{name}{suffix}")
    for name in ("x" * 300, "a\0b", "missing"):
        with pytest.raises(DumpError, match="cannot be opened"):
            open_dump(tmp_path / f"{name}{suffix}")


@pytest.mark.parametrize("side", [0, 1])
def test_a_whole_file_of_another_major_is_refused_for_its_major_and_not_as_damage(
    pair: Pair, side: int
) -> None:
    path, contract = pair[side], ("rollout-dump.v1", "train-dump.v2")[side]
    table, keys = pq.read_table(path), pq.read_metadata(path).metadata
    header = keys[HEADER_KEY.encode()].replace(contract.encode(), b"other-dump.v9")
    sealed = {HEADER_KEY: header, CRC_KEY: str(zlib.crc32(header))}
    with pq.ParquetWriter(path, table.schema.remove_metadata()) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(sealed)
    with pytest.raises(
        UnsupportedContractError, match=r"its contract is 'other-dump\.v9' .*'train-dump\.v2' or"
    ):
        open_dump(path)
