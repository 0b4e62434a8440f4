"""Plain columns past arrow: whatever damaged the file, the values are arrow's, or none."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stubs.dump_batches import Columns, ragged

import rl_dump.parquet.reader
from rl_dump import DumpError, open_dump, write_dump
from rl_dump.parquet.arrow_columns import checksum
from rl_dump.parquet.plain_columns import read_plain


def noise(num_samples: int = 300, *, longest: int = 3000, seed: int = 0) -> Columns:
    """Return responses of noise, which no encoding makes smaller; some responses are empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, num_samples)
    lengths[::7] = 0
    return {
        "response_lengths": lengths,
        "log_probs": ragged([rng.normal(size=length) for length in lengths], np.float32),
        "values": ragged([rng.normal(size=length) for length in lengths], np.float64),
        "kl": ragged([rng.normal(size=length) for length in lengths], np.float16),
    }


def written(path: Path, columns: Columns) -> Path:
    return write_dump(path, contract="train-dump.v2", batch_id=0, columns=columns)


def plain(
    path: Path, name: str, lengths: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[Any] | None:
    """Call `read_plain` as the reader does."""
    with open_dump(path) as dump:
        given = np.asarray(dump.column("response_lengths")) if lengths is None else lengths
        column, dtype = list(dump.fields).index(name), np.dtype(dump.fields[name].stored)
        return read_plain(
            memoryview(path.read_bytes()),
            pq.read_metadata(path),
            column,
            dtype,
            given,
            dump.header["checksums"][name],
        )


@pytest.fixture
def arrow_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], Any]:
    def read(path: Path, name: str) -> Any:
        with monkeypatch.context() as patch, open_dump(path) as dump:
            patch.setattr(rl_dump.parquet.reader, "read_plain", lambda *_: None)
            return dump.column(name)

    return read


def test_the_result_is_what_arrow_gives(
    tmp_path: Path, arrow_only: Callable[[Path, str], Any]
) -> None:
    columns = noise()
    path = written(tmp_path / "x.parquet", columns)
    assert pq.read_metadata(path).num_row_groups > 2
    with open_dump(path) as dump:
        for name in ("log_probs", "values", "kl"):
            assert dump.column(name) == columns[name] == arrow_only(path, name)
    assert [plain(path, name) is not None for name in ("log_probs", "values", "kl")] == [
        True,
        True,
        False,
    ], "float16 is packed: a third of the bits of the float32 it is stored as are always zero"


def test_values_are_little_endian_in_the_file_and_in_the_checksum(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=5000)
    path = written(
        tmp_path / "x.parquet",
        {"response_lengths": np.array([5000]), "log_probs": ragged([values], np.float32)},
    )
    raw = values.astype("<f4").tobytes()
    assert raw in path.read_bytes()
    with open_dump(path) as dump:
        assert dump.header["checksums"]["log_probs"] == [
            zlib.crc32(raw, zlib.crc32((5000).to_bytes(4, "little")))
        ]
    numbers = pa.array(np.array([1, 256], np.int32))
    assert checksum(numbers) == zlib.crc32(b"\x01\0\0\0\0\x01\0\0")


@pytest.mark.parametrize("num_samples", [0, 1, 7])
def test_no_samples_and_empty_responses_are_columns_like_others(
    tmp_path: Path, num_samples: int
) -> None:
    columns: Columns = {
        "response_lengths": np.zeros(num_samples, np.int64),
        "log_probs": ragged([np.zeros(0)] * num_samples, np.float32),
    }
    with open_dump(written(tmp_path / "x.parquet", columns)) as dump:
        assert dump.column("log_probs") == columns["log_probs"]
        assert dump.verify() == []


def test_a_sample_without_a_value_is_none_not_empty(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first, last = (rng.normal(size=9000).astype(np.float32) for _ in range(2))
    path = write_dump(
        tmp_path / "x.parquet",
        contract="train-dump.v2",
        batch_id=0,
        columns={
            "response_lengths": np.array([9000, 0, 9000]),
            "teacher_log_probs": [first, None, last],
        },
    )
    with open_dump(path) as dump:
        assert dump.fields["teacher_log_probs"].nullable
        found = dump.column("teacher_log_probs")
        assert found[1] is None
        assert found[2].tobytes() == last.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"compression": "none", "use_dictionary": False}, id="plain, with statistics"),
        pytest.param(
            {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"},
            id="pages of version 2",
        ),
        pytest.param(
            {
                "compression": "none",
                "use_dictionary": False,
                "data_page_size": 4096,
                "write_page_index": True,
            },
            id="many pages",
        ),
        pytest.param({"compression": "none", "use_dictionary": True}, id="dictionary"),
        pytest.param(
            {"compression": "none", "use_dictionary": True, "dictionary_pagesize_limit": 100},
            id="dictionary given up",
        ),
        pytest.param({"compression": "snappy", "use_dictionary": False}, id="snappy"),
        pytest.param({"compression": "lz4"}, id="lz4"),
        pytest.param(
            {"compression": "none", "use_dictionary": False, "use_byte_stream_split": True},
            id="split",
        ),
    ],
)
def test_files_that_another_writer_packed_are_read_the_same(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    columns = noise(80)
    path = written(tmp_path / "x.parquet", columns)
    source = pq.ParquetFile(path)
    other = tmp_path / "other.parquet"
    if options.get("use_byte_stream_split"):
        options = {
            **options,
            "use_byte_stream_split": [
                f"{name}.list.element" for name in ("log_probs", "values", "kl")
            ],
        }
    with pq.ParquetWriter(other, source.schema_arrow.remove_metadata(), **options) as writer:
        for group in range(source.num_row_groups):
            writer.write_table(source.read_row_group(group))
        keys = {
            key: value
            for key, value in source.metadata.metadata.items()
            if key.startswith(b"rl_dump")
        }
        writer.add_key_value_metadata(keys)
    with open_dump(other) as dump:
        assert dump.verify() == []
        for name in ("log_probs", "values", "kl"):
            assert dump.column(name) == columns[name]
    for name in ("log_probs", "values"):
        found = plain(other, name)
        assert found is None or np.array_equal(found, columns[name].values)


def test_a_flipped_bit_anywhere_in_a_chunk_is_refused(tmp_path: Path) -> None:
    columns = noise(40, longest=600)
    path = written(tmp_path / "x.parquet", columns)
    whole = path.read_bytes()
    chunk = pq.read_metadata(path).row_group(0).column(1)
    start, size = chunk.data_page_offset, chunk.total_compressed_size
    rng = np.random.default_rng(0)
    values_at = start + size - 4 * int(np.sum(columns["response_lengths"]))
    inside = [start + size - 1, values_at, *rng.integers(values_at, start + size, 30).tolist()]
    for at in inside:
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
        )
        with open_dump(path) as dump:
            with pytest.raises(
                DumpError, match="field log_probs, row group 0: the checksum does not match"
            ):
                dump.column("log_probs")
            assert [problem.code for problem in dump.verify()] == ["damaged"]
            assert dump.column("values") == columns["values"], "the other columns are as they were"
    # Page header and levels: what they say is not needed for the values, so these are right, or
    # refused.
    for at in range(start, values_at):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
        with open_dump(path) as dump:
            assert dump.column("log_probs") == columns["log_probs"]


def test_a_damaged_column_of_lengths_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    columns = noise(40, longest=600)
    path = written(tmp_path / "x.parquet", columns)
    whole = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(0).column(0)
    whole[chunk.dictionary_page_offset + chunk.total_compressed_size // 2] ^= 0x55
    path.write_bytes(whole)
    with open_dump(path) as dump:
        with pytest.raises(DumpError, match="field response_lengths"):
            dump.column("response_lengths")
        assert dump.column("log_probs") == columns["log_probs"]


def test_lengths_that_the_file_does_not_have_are_left_to_arrow(tmp_path: Path) -> None:
    columns = noise()
    path = written(tmp_path / "x.parquet", columns)
    lengths = np.asarray(columns["response_lengths"])
    assert plain(path, "log_probs", lengths) is not None
    longer = np.where(np.arange(300) == 5, lengths + 1, lengths)
    for wrong in (
        lengths[::-1].copy(),
        longer,
        lengths - 1,
        lengths + (1 << 40),
        np.full(300, 1 << 62),
        lengths * 3,
    ):
        assert plain(path, "log_probs", wrong) is None


def test_a_footer_that_points_elsewhere_gives_nothing(tmp_path: Path) -> None:
    columns = noise()
    path = written(tmp_path / "x.parquet", columns)
    whole, metadata, lengths = (
        memoryview(path.read_bytes()),
        pq.read_metadata(path),
        np.asarray(columns["response_lengths"]),
    )
    with open_dump(path) as dump:
        checksums = dump.header["checksums"]["log_probs"]
    float32 = np.dtype(np.float32)
    assert read_plain(whole, metadata, 1, float32, lengths, checksums) is not None
    assert read_plain(whole, metadata, 0, float32, lengths, checksums) is None
    assert read_plain(whole, metadata, 2, float32, lengths, checksums) is None
    assert read_plain(whole, metadata, 1, np.dtype(np.float64), lengths, checksums) is None
    assert read_plain(whole, metadata, 1, float32, lengths, [0] * len(checksums)) is None
    assert read_plain(whole[: len(whole) // 2], metadata, 1, float32, lengths, checksums) is None
