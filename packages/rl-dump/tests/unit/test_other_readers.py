"""A Parquet dump opens in the tools people have, without this package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stubs.dump_batches import Columns, Pair

from rl_dump import RaggedArray, open_dump


@pytest.fixture
def train(pair: Pair) -> Path:
    return pair[1]


@pytest.fixture
def expected(train: Path) -> dict[str, Any]:
    with open_dump(train) as dump:
        return {
            name: dump.column(name)
            for name in (
                "tokens",
                "log_probs",
                "rewards",
                "loss_masks",
                "finish_reason",
                "truncated",
                "nucleus_offsets",
            )
        }


def same(found: Sequence[Any], column: RaggedArray | Sequence[Any]) -> None:
    assert len(found) == len(column)
    for mine, theirs in zip(column, found, strict=True):
        assert np.array_equal(mine, np.asarray(theirs))


def test_pandas_reads_it(train: Path, expected: dict[str, Any]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(train)
    for name, column in expected.items():
        same(frame[name], column)


def test_polars_reads_it(train: Path, expected: dict[str, Any]) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(train)
    for name, column in expected.items():
        same(frame[name].to_list(), column)
    assert frame.filter(polars.col("response_lengths") > 10)["log_probs"].list.mean().len() > 0


def test_duckdb_reads_it(train: Path, expected: dict[str, Any]) -> None:
    duckdb = pytest.importorskip("duckdb")
    for name, column in expected.items():
        same([row[0] for row in duckdb.sql(f"select {name} from '{train}'").fetchall()], column)
    total = duckdb.sql(f"select sum(len(tokens)) from '{train}'").fetchall()[0][0]
    assert total == len(expected["tokens"].values)


def test_pyarrow_finds_the_header_in_the_files_metadata(train: Path) -> None:
    import pyarrow.parquet as pq

    header = (
        json.loads(pq.read_schema(train).metadata[b"rl_dump"])
        if b"rl_dump" in (pq.read_schema(train).metadata or {})
        else None
    )
    header = header or json.loads(pq.read_metadata(train).metadata[b"rl_dump"])
    assert (header["contract"], header["batch_id"], header["num_samples"]) == (
        "train-dump.v2",
        0,
        24,
    )


def test_a_file_with_packed_columns_opens_everywhere(tmp_path: Path) -> None:
    """Byte-stream split, delta and dictionary pages, each chosen because it pays."""
    from stubs.dump_batches import ragged

    from rl_dump import write_dump

    rng = np.random.default_rng(0)
    lengths = np.full(64, 500)
    columns: Columns = {
        "response_lengths": lengths,
        "tokens": ragged(rng.integers(0, 100_000, (64, 500)), np.int64),
        "log_probs": ragged(-np.exp2(-rng.integers(0, 4, (64, 500)) * 1.0), np.float32),
        "values": ragged(1 + rng.random((64, 500)), np.float32),
        "advantages": ragged(np.full((64, 500), 0.5), np.float32),
    }
    path = write_dump(tmp_path / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    import pyarrow.parquet as pq

    group = pq.ParquetFile(path).metadata.row_group(0)
    used = {
        encoding for index in range(group.num_columns) for encoding in group.column(index).encodings
    }
    assert {"DELTA_BINARY_PACKED", "RLE_DICTIONARY", "BYTE_STREAM_SPLIT"} <= used
    readers = []
    for name, read in (("pandas", "read_parquet"), ("polars", "read_parquet")):
        try:
            readers.append(getattr(__import__(name), read))
        except ImportError:
            continue
    for read in readers:
        frame = read(path)
        for name, column in columns.items():
            same(list(frame[name]), column)
