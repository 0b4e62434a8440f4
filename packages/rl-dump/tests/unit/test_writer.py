"""Writing: row groups of bounded size, what is refused, and what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from stubs.dump_batches import Columns, Pair, batch, equal, items_of, numbers_of, ragged

import rl_dump
from rl_dump import DumpError, RaggedArray, open_dump, write_dump
from rl_dump.parquet.writer import ROW_GROUP_BYTES, row_bytes, row_group_bounds


def write(path: Path, columns: Columns, **header: Any) -> Path:
    return write_dump(
        path / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns, **header
    )


def test_every_column_comes_back_with_dtype_and_bits(tmp_path: Path, columns: Columns) -> None:
    with open_dump(write(tmp_path, columns)) as dump:
        for name, column in columns.items():
            assert equal(dump.column(name), column), name


@pytest.mark.parametrize(
    "dtype",
    [
        np.bool_,
        np.int8,
        np.int16,
        np.int32,
        np.int64,
        np.uint8,
        np.uint16,
        np.uint32,
        np.uint64,
        np.float16,
        np.float32,
        np.float64,
    ],
)
def test_every_dtype_round_trips_scalar_and_ragged(tmp_path: Path, dtype: Any) -> None:
    if np.dtype(dtype).kind == "f":
        extremes = [0.0, -0.0, np.finfo(dtype).tiny, np.finfo(dtype).max, np.inf, -np.inf, np.nan]
    else:
        extremes = [0, 1] if dtype is np.bool_ else [0, np.iinfo(dtype).min, np.iinfo(dtype).max]
    flat = np.array(extremes, dtype)
    columns = {"one": flat, "many": RaggedArray.from_list([flat] * len(flat), dtype)}
    with open_dump(write(tmp_path, columns)) as dump:
        assert numbers_of(dump, "one").tobytes() == flat.tobytes()
        assert numbers_of(dump, "one").dtype == dtype
        assert dump.column("many") == columns["many"]
        assert dump.sample(0)["many"].dtype == dtype


def test_token_ids_are_stored_in_the_smallest_integer_that_fits(tmp_path: Path) -> None:
    for highest, stored in (
        (255, "uint8"),
        (256, "uint16"),
        (151_935, "int32"),
        (2**31, "uint32"),
        (2**40, "int64"),
    ):
        columns = {"tokens": ragged([[0, highest]], np.int64)}
        with open_dump(write(tmp_path, columns)) as dump:
            assert dump.fields["tokens"].stored == stored
            assert dump.fields["tokens"].dtype == "int64"
            assert items_of(dump, "tokens").dtype == np.int64
            narrow = dump.column("tokens", stored=True)
            assert isinstance(narrow, RaggedArray)
            assert narrow.dtype == np.dtype(stored)
            assert dump.column("tokens")[0].tolist() == [0, highest]


def test_row_groups_are_bounded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 60_000, 100)
    columns = {
        "response_lengths": lengths,
        "log_probs": ragged([rng.normal(size=length) for length in lengths], np.float32),
    }
    path = write(tmp_path, columns)
    metadata = pq.ParquetFile(path).metadata
    with open_dump(path) as dump:
        assert metadata.num_row_groups == len(dump.header["row_groups"]) > 5
        sizes = row_bytes(dump.columns(), 100)
        ends = np.cumsum(dump.header["row_groups"])
        assert all(
            sizes[end - count : end].sum() <= ROW_GROUP_BYTES
            for end, count in zip(ends, dump.header["row_groups"], strict=True)
        )


def test_a_sample_larger_than_a_row_group_stands_alone() -> None:
    assert row_group_bounds(np.array([3, 3, 9, 1]), limit=6) == [(0, 2), (2, 3), (3, 4)]
    assert row_group_bounds(np.array([], np.int64)) == []
    assert row_group_bounds(np.array([100, 100]), limit=6) == [(0, 1), (1, 2)]


def test_page_checksums_are_written(tmp_path: Path, columns: Columns) -> None:
    path = write(tmp_path, columns)
    data = bytearray(path.read_bytes())
    at = (
        pq.ParquetFile(path)
        .metadata.row_group(0)
        .column(list(columns).index("log_probs"))
        .data_page_offset
        + 60
    )
    data[at] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(OSError, match="checksum"):
        pq.read_table(path, page_checksum_verification=True)


def test_everything_beside_the_samples_comes_back(tmp_path: Path, columns: Columns) -> None:
    header = {
        "dp_shards": [
            {
                "rank": 4,
                "data_parallel_rank": 0,
                "partition": list(range(24)),
                "num_microbatches": [2, 1],
            }
        ],
        "schedule": {"contract": "schedule-plan.v1", "partitions": np.arange(4), "digest": "ab"},
        "raw_reward": [0.1, float("nan"), float("inf")],
        "dropped": [
            {
                "rollout_position": 99,
                "sample_index": None,
                "rollout_id": 7,
                "reason": "does not fill a step",
            }
        ],
        "writer_rank": 4,
        "metadata": {"loss": np.float32(0.25), "note": ("a", b"b"), 3: None},
    }
    with open_dump(write(tmp_path, columns, **header)) as dump:
        assert dump.dp_shards == header["dp_shards"]
        assert dump.schedule is not None
        assert dump.schedule["partitions"].tolist() == [0, 1, 2, 3]
        assert repr(dump.raw_reward) == repr(header["raw_reward"])
        assert dump.dropped == header["dropped"]
        assert dump.metadata == header["metadata"]
        assert dump.header["writer_rank"] == 4
        assert dump.header["producer"]["distribution"] == "rl-dump"


def test_missing_values_stay_missing(tmp_path: Path) -> None:
    columns = {
        "sample_index": [None, 3],
        "teacher_log_probs": [None, np.ones(2, np.float32)],
        "finish_reason": ["stop", None],
        "label": [None, {"a": 1}],
        "values": [None, None],
    }
    with open_dump(write(tmp_path, columns)) as dump:
        assert dump.column("sample_index") == [None, 3]
        assert dump.column("teacher_log_probs")[0] is None
        assert dump.column("teacher_log_probs")[1].tolist() == [1, 1]
        assert dump.column("finish_reason") == ["stop", None]
        assert dump.column("label") == [None, {"a": 1}]
        assert dump.column("values") == [None, None]
        assert dump.sample(0)["teacher_log_probs"] is None


def test_trailing_dimensions_round_trip(tmp_path: Path) -> None:
    columns = {
        "top_log_probs": ragged([np.arange(6).reshape(3, 2), np.zeros((0, 2))], np.float32),
        "pair": np.arange(4).reshape(2, 2),
    }
    with open_dump(write(tmp_path, columns)) as dump:
        assert dump.column("top_log_probs") == columns["top_log_probs"]
        assert dump.column("pair")[1].tolist() == [2, 3]
        assert dump.sample(0)["top_log_probs"].shape == (3, 2)


def test_an_empty_batch_is_a_dump(tmp_path: Path) -> None:
    with open_dump(write(tmp_path, batch(0))) as dump:
        assert dump.num_samples == 0
        assert len(dump.column("tokens")) == 0
        assert dump.verify() == []
    with open_dump(write(tmp_path, {})) as dump:
        assert dict(dump.fields) == {}
        assert dump.num_samples == 0


def test_all_problems_of_a_batch_are_reported_at_once(tmp_path: Path, columns: Columns) -> None:
    broken = {
        **columns,
        "loss_masks": ragged([[1]] * 24, np.int32),
        "tokens": ragged([[1]] * 24, np.int64),
        "truncated": np.zeros(24),
        "a.b": np.zeros(24),
    }
    with pytest.raises(DumpError) as failure:
        write(tmp_path, broken)
    text = str(failure.value)
    assert "loss_masks: sample 0 has 1 values, response_lengths says" in text
    assert "tokens: sample 0 has 1 values, total_lengths says" in text
    assert "truncated: the contract says bool, got float64" in text
    assert "'a.b' cannot be a column" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": np.zeros(3)}, "different numbers of samples: .*3 in rewards"),
        (
            {"nucleus_ids": ragged([[1]] * 24, np.int32)},
            "nucleus_ids: sample .* the last of nucleus_offsets says",
        ),
        (
            {"nucleus_offsets": ragged([[0]] * 24, np.int64)},
            r"nucleus_offsets: sample .* response_lengths \+ 1 says",
        ),
        ({"loss_masks": ragged([[2**40]] * 24, np.int64)}, "do not fit the contract's int32"),
        (
            {"advantages": np.zeros(24, np.float32)},
            r"advantages: must hold \[R\] values per sample, got one per sample",
        ),
        ({"finish_reason": np.zeros(24)}, "finish_reason: the contract says string"),
        ({"x": np.zeros(24, np.complex64)}, "x: dtype complex64 cannot be stored"),
        ({"x": np.float64(3)}, "x: a float64 is not a column"),
        ({"label": [object()] * 24}, "label of sample 0: cannot write a builtins.object"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    tmp_path: Path, columns: Columns, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DumpError, match=message):
        write(tmp_path, {**columns, **change})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("header", "error", "message"),
    [
        ({"contract": "train-dump.v1"}, rl_dump.UnsupportedContractError, "train-dump.v1"),
        ({"batch_id": None}, DumpError, "batch_id"),
        ({"batch_id": True}, DumpError, "batch_id"),
        ({"dropped": [{"rollout_position": 3}]}, DumpError, "gives no reason"),
        ({"path": "x.pt"}, DumpError, "makes .parquet files"),
    ],
)
def test_headers_that_do_not_fit_are_refused(
    tmp_path: Path, columns: Columns, header: dict[str, Any], error: type[Exception], message: str
) -> None:
    options: dict[str, Any] = {
        "contract": "train-dump.v2",
        "batch_id": 0,
        "path": "x.parquet",
        **header,
    }
    with pytest.raises(error, match=message):
        write_dump(tmp_path / options.pop("path"), columns=columns, **options)


def test_the_streaming_writer_checks_its_pieces(tmp_path: Path, pair: Pair) -> None:
    with open_dump(pair[1]) as dump:
        columns, fields = dump.columns(), list(dump.fields.values())
        writer = rl_dump.DumpWriter(
            tmp_path / "y.parquet",
            fields=fields,
            contract="train-dump.v2",
            batch_id=0,
            writer_rank=0,
        )
        with pytest.raises(DumpError, match="outside of the writer's `with` block"):
            writer.write(columns)
        with pytest.raises(DumpError, match="row group has fields"), writer:
            writer.write({"tokens": columns["tokens"]})
        assert not (tmp_path / "y.parquet").exists()


def test_custom_fields_can_be_registered_as_response_aligned(
    tmp_path: Path, columns: Columns
) -> None:
    mine = ragged([np.ones(length) for length in columns["response_lengths"]], np.float32)
    with open_dump(
        write(
            tmp_path, {**columns, "mine": mine}, response_fields=(*rl_dump.RESPONSE_FIELDS, "mine")
        )
    ) as dump:
        assert dump.fields["mine"].response_aligned
        assert dump.fields["advantages"].response_aligned
        assert not dump.fields["tokens"].response_aligned
    wrong = ragged([np.ones(1)] * 24, np.float32)
    with pytest.raises(DumpError, match="mine: sample"):
        write(tmp_path, {**columns, "mine": wrong}, response_fields=("mine",))


def test_a_keyword_that_no_header_has_is_refused_not_dropped(tmp_path: Path) -> None:
    keywords: dict[str, Any] = {
        "contract": "train-dump.v2",
        "batch_id": 0,
        "columns": {"x": np.zeros(2)},
        "raw_rewards": [1.0],
    }
    with pytest.raises(TypeError, match="raw_rewards"):
        write_dump(tmp_path / "x.parquet", **keywords)
    assert list(tmp_path.iterdir()) == []


def test_a_lone_surrogate_is_refused_naming_field_and_sample(tmp_path: Path) -> None:
    for values, where in (
        (["ok", "\u00e9", "a\ud800"], "prompt of sample 2: holds"),
        ([{"a": 1}, {"a": "x"}, {"a": "\udfff"}], "prompt of sample 2"),
    ):
        with pytest.raises(DumpError, match=rf"{where}.* lone surrogate U\+D"):
            write_dump(
                tmp_path / "x.parquet",
                contract="rollout-dump.v1",
                batch_id=0,
                columns={"prompt": values},
            )
    with pytest.raises(DumpError, match="nor contain a dot or a lone surrogate"):
        write_dump(
            tmp_path / "x.parquet", contract="rollout-dump.v1", batch_id=0, columns={"\ud800": [1]}
        )
    assert list(tmp_path.iterdir()) == []


def test_the_sample_named_is_the_files_row_not_the_row_groups(tmp_path: Path) -> None:
    columns = {"prompt": ["x" * 1_500_000] * 3 + ["\ud800"]}
    with pytest.raises(DumpError, match="prompt of sample 3"):
        write_dump(tmp_path / "x.parquet", contract="rollout-dump.v1", batch_id=0, columns=columns)
