"""Which files the command line reads, and how it refuses others."""

import json
from pathlib import Path

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.study.batch_file import read_batch


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text", "lengths", "ids"),
    [
        ("a.jsonl", "5\n\n7\n", [5, 7], [0, 1]),
        ("a.txt", "5\n7", [5, 7], [0, 1]),
        (
            "a.jsonl",
            '{"total_length": 5, "rollout_id": 3}\n{"length": 7, "rollout_ids": 3}\n',
            [5, 7],
            [3, 3],
        ),
        ("a.jsonl", '{"total_lengths": 5}\n', [5], [0]),
        ("a.json", "[5, 7]", [5, 7], [0, 1]),
        ("a.json", '[{"total_length": 5, "rollout_id": 0}]', [5], [0]),
        ("a.json", '{"total_lengths": [5, 7], "rollout_ids": [1, 1]}', [5, 7], [1, 1]),
        ("a.json", '{"total_lengths": [5, 7]}', [5, 7], [0, 1]),
        ("a.json", '{"total_lengths": [5, 7], "rollout_ids": ["b", "a"]}', [5, 7], [0, 1]),
        ("a.jsonl", "\ufeff5\n7\n", [5, 7], [0, 1]),
        ("a.json", "\ufeff[5, 7]", [5, 7], [0, 1]),
        ("a.csv", "\ufefftotal_length,rollout_id\n5,3\n7,3\n", [5, 7], [3, 3]),
        ("a.csv", "5\n7\n", [5, 7], [0, 1]),
        ("a.csv", "5,3\r\n\r\n7,3\r\n", [5, 7], [3, 3]),
        ("a.CSV", 'label,length\n"a, b",5\n"x ""y""\nz",7\n', [5, 7], [0, 1]),
        ("a.tsv", "rollout_id\tlength\nu1\t5\nu1\t 7\n", [5, 7], [0, 0]),
        ("a.csv", "length,rollout_ids\n5,7\n6,a\n7,7\n", [5, 6, 7], [0, 1, 0]),
    ],
)
def test_files_that_are_understood(
    tmp_path: Path, name: str, text: str, lengths: list[int], ids: list[int]
) -> None:
    batch = read_batch(write(tmp_path, name, text))
    assert (batch.total_lengths.tolist(), batch.rollout_ids.tolist()) == (lengths, ids)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "", "no samples"),
        ("a.jsonl", "5\nfive\n", "line 2 is not JSON"),
        ("a.jsonl", "5\n6.5\n", "line 2 must be an integer"),
        ("a.jsonl", "5\ntrue\n", "line 2 must be an integer"),
        ("a.jsonl", '{"tokens": 5}\n', "line 1 must be an integer or an object with total_length"),
        ("a.jsonl", '5\n{"total_length": 5, "rollout_id": 3}\n', "line 2 has a rollout_id"),
        ("a.jsonl", '{"total_length": 5, "rollout_id": 3}\n5\n', "line 2 has no rollout_id"),
        ("a.jsonl", "5\n0\n", "sample 1 has 0"),
        ("a.json", "{", "line 1 is not JSON"),
        ("a.json", "5", "expected a list"),
        ("a.json", '{"total_lengths": 5}', "expected a list"),
        ("a.json", '{"document": {}, "arrays": {"total_lengths": [5]}}', "expected a list"),
        (
            "a.json",
            '{"total_lengths": [5, 6], "rollout_ids": [1]}',
            "2 total_lengths but 1 rollout_ids",
        ),
        ("a.json", '{"total_lengths": [5, "x"]}', "total_lengths[1]"),
        ("a.json", "[" * 100_000, "cannot be read as JSON"),
        ("a.jsonl", "5\n" + "9" * 5_000 + "\n", "line 2"),
        ("a.csv", "", "no samples"),
        ("a.csv", "length\n", "no samples"),
        ("a.csv", "tokens\n5\n", "no column total_length; columns are tokens"),
        ("a.csv", "5,1,2\n", "line 1 has 3 columns and no header"),
        ("a.csv", "length,rollout_id\n5,1\n6\n", "line 3 has 1 columns, the header has 2"),
        ("a.csv", "length,rollout_id\n5,1\n6,\n", "line 3 has no rollout_id"),
        ("a.csv", "length\n5\n6.5\n", "line 3 must be an integer"),
        ("a.csv", "length\n1_000\n", "line 2 must be an integer"),
        ("a.csv", "length\nfive\n", "line 2 must be an integer"),
        ("a.csv", "length\n" + "9" * 5_000 + "\n", "line 2 must be an integer"),
        ("a.csv", 'length\n"' + "5" * 200_000 + '"\n', "line 2 is not CSV"),
        ("a.jsonl", '{"total_length": 5, "sample_cost": -1}\n', "sample 0 has -1"),
        ("a.parquet", "not parquet", "Parquet"),
    ],
)
def test_files_that_are_refused_name_the_place(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(rs.ScheduleError) as caught:
        read_batch(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_costs_and_pairs_stand_beside_lengths(tmp_path: Path) -> None:
    text = "length,rollout_id,sample_cost,keep_together\n5,a,1.5,p\n6,a,2,p\n7,b,0,q\n"
    batch = read_batch(write(tmp_path, "a.csv", text))
    request = rs.ScheduleRequest(
        **batch.columns(), global_batch_size=2, dp_size=1, max_tokens_per_gpu=20
    )
    assert request.rollout_names == ("a", "b")
    assert np.asarray(request.sample_costs).tolist() == [1.5, 2.0, 0.0]
    assert np.asarray(request.keep_together).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("name", "text", "unused"),
    [
        ("a.csv", "length,uid\n5,a\n6,a\n", ("uid",)),
        ("a.csv", "total_length,length\n5,4\n", ("length",)),
        ("a.csv", "5,1\n6,1\n", ()),
        ("a.tsv", "uid\tlength\nu1\t5\n", ("uid",)),
        ("a.jsonl", '{"length": 5, "uid": "a"}\n{"length": 5, "id": 2, "uid": 1}\n', ("uid", "id")),
        ("a.jsonl", '5\n{"length": 6}\n', ()),
        ("a.json", '[{"total_length": 5, "group": 0}]', ("group",)),
        ("a.json", '{"total_lengths": [5], "rollout_id": [0]}', ("rollout_id",)),
        ("a.json", '{"total_lengths": [5], "rollout_ids": [0]}', ()),
    ],
)
def test_columns_that_nothing_reads_are_named(
    tmp_path: Path, name: str, text: str, unused: tuple[str, ...]
) -> None:
    assert read_batch(write(tmp_path, name, text)).unused == unused


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rs.ScheduleError, match="no such file"):
        read_batch(tmp_path / "none.jsonl")


def test_a_rollout_dump_is_read_by_its_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rollout.parquet"
    parquet.write_table(
        pyarrow.table({"total_lengths": [5, 7], "rollout_ids": [1, 1], "label": ["a", "b"]}), path
    )
    batch = read_batch(path)
    assert (batch.total_lengths.tolist(), batch.rollout_ids.tolist()) == ([5, 7], [1, 1])
    assert batch.unused == ("label",)
    parquet.write_table(pyarrow.table({"lengths": [5]}), path)
    with pytest.raises(rs.ScheduleError, match="no column total_lengths"):
        read_batch(path)


GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_frozen_dump_of_another_package_is_read() -> None:
    pytest.importorskip("pyarrow")
    dump = read_batch(GOLDEN / "rollout-dump.v1" / "three_samples.parquet")
    assert (dump.total_lengths.tolist(), dump.rollout_ids.tolist()) == ([5, 3, 2], [0, 0, 1])
    assert dump.unused == ()


def test_another_contract_is_refused_with_both_ids(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"total_lengths": [5]}).replace_schema_metadata(
        {"rl_dump": json.dumps({"contract": "train-dump.v2"})}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(rs.UnsupportedContractError, match=r"train-dump\.v2.*rollout-dump\.v1"):
        read_batch(tmp_path / "a.parquet")


@pytest.mark.parametrize("header", ["[1]", '"rollout-dump.v1"', "null", "7"])
def test_a_header_that_is_not_an_object_is_refused(tmp_path: Path, header: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"total_lengths": [5]}).replace_schema_metadata({"rl_dump": header})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(rs.UnsupportedContractError, match=r"a\.parquet: expected an object"):
        read_batch(tmp_path / "a.parquet")


def test_every_line_counts(tmp_path: Path) -> None:
    text = "\n".join(json.dumps({"total_length": 1 + i}) for i in range(1000))
    assert read_batch(write(tmp_path, "a.jsonl", text)).total_lengths.tolist() == list(
        range(1, 1001)
    )
