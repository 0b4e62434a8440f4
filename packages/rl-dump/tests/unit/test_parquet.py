"""Arrow arrays: checksums of values, encodings that pay, and what a reader checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stubs.dump_batches import Columns, ragged

from rl_dump import DumpError, open_dump, write_dump
from rl_dump.columns.column_types import column_of
from rl_dump.columns.fields import ColumnInput
from rl_dump.parquet.arrow_columns import checksum, decode, encode, smallest_stored
from rl_dump.parquet.encoding import DELTA, DICTIONARY, PLAIN, SPLIT, Encoding, choose_encodings


def chosen(values: ColumnInput) -> Encoding:
    column = column_of("x", values)
    return choose_encodings([column.field], {"x": encode(column)})["x"]


def test_what_does_not_pay_is_left_plain() -> None:
    rng = np.random.default_rng(0)
    assert chosen(ragged([rng.normal(size=20_000)], np.float32)) is PLAIN
    assert chosen(ragged([np.full(20_000, 0.25)], np.float32)) in (DICTIONARY, SPLIT)
    assert (
        chosen(ragged([rng.choice(rng.normal(size=9).astype(np.float32), 20_000)], np.float32))
        is DICTIONARY
    )
    assert chosen(ragged([1 + rng.random(20_000)], np.float32)) is SPLIT
    assert chosen(ragged([rng.integers(0, 100_000, 20_000)], np.int32)) is DELTA
    assert chosen(ragged([rng.integers(0, 4, 20_000)], np.int32)) in (DICTIONARY, DELTA)
    assert chosen(["text"] * 10) is DICTIONARY
    assert chosen(ragged([[True] * 100], np.bool_)) is DICTIONARY


def test_checksums_depend_on_values_and_lengths_and_on_nothing_else() -> None:
    column = column_of("x", [np.array([1.0, 2.0]), None, np.array([3.0])])
    array = encode(column)
    padded = pa.concat_arrays([array, array, array]).slice(3, 3)
    assert checksum(padded) == checksum(array)
    other = encode(column_of("x", [np.array([1.0]), None, np.array([2.0, 3.0])]))
    assert checksum(other) != checksum(array)
    flipped = encode(column_of("x", [np.array([1.0, -2.0]), None, np.array([3.0])]))
    assert checksum(flipped) != checksum(array)
    present = encode(column_of("x", [np.array([1.0, 2.0]), np.zeros(0), np.array([3.0])]))
    assert checksum(present) != checksum(array)


@pytest.mark.parametrize(
    "values", [["a", None, "ü"], [1, None, 3], [True, False], [0.5, float("nan")], [{"a": 1}, None]]
)
def test_encode_and_decode_are_inverse_for_slices_too(values: Any) -> None:
    column = column_of("x", values)
    array = pa.concat_arrays([encode(column), encode(column)]).slice(len(values))
    found = decode(column.field, array)
    assert repr([found.item(row) for row in range(len(values))]) == repr(values)


def test_the_smallest_integer_is_chosen_by_range() -> None:
    assert smallest_stored("int64", 0, 255) == "uint8"
    assert smallest_stored("int64", -1, 127) == "int8"
    assert smallest_stored("int64", 0, 2**16 - 1) == "uint16"
    assert smallest_stored("uint64", 0, 2**64 - 1) == "uint64"
    assert smallest_stored("int32", 0, 1) == "int32"


def test_an_array_of_another_type_is_refused() -> None:
    field = column_of("x", [1.5]).field
    with pytest.raises(DumpError, match="the header says double, the file holds int64"):
        decode(field, pa.array([1]))


def test_a_file_that_another_program_rewrote_is_refused_not_believed(
    tmp_path: Path, columns: Columns
) -> None:
    path = write_dump(tmp_path / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    table, metadata = pq.read_table(path), pq.read_metadata(path).metadata
    from rl_dump import open_dump

    def rewritten(table: pa.Table) -> Path:
        with pq.ParquetWriter(path, table.schema.remove_metadata()) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(
                {key: value for key, value in metadata.items() if key.startswith(b"rl_dump")}
            )
        return path

    with open_dump(rewritten(table)) as dump:
        assert dump.verify() == [], "the same values in other pages are the same dump"
    with pytest.raises(DumpError, match="the header says 24 in 1"):
        open_dump(rewritten(table.slice(0, 10)))
    with pytest.raises(DumpError, match="do not have the names and types"):
        open_dump(rewritten(table.drop_columns(["entropy"])))
    changed = table.set_column(
        table.schema.get_field_index("rewards"),
        table.schema.field("rewards"),
        pa.array(np.ones(24)),
    )
    with (
        open_dump(rewritten(changed)) as dump,
        pytest.raises(DumpError, match="field rewards, row group 0: the checksum does not match"),
    ):
        dump.column("rewards")


def test_short_memory_is_told_as_such_and_never_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_dump(
        tmp_path / "x.parquet", contract="rollout-dump.v1", batch_id=0, columns={"x": np.arange(3)}
    )

    def short(*_: object, **__: object) -> None:
        raise MemoryError("malloc of size 9 failed")

    with open_dump(path) as dump:
        monkeypatch.setattr(pq.ParquetFile, "read", short)
        with pytest.raises(
            DumpError,
            match=r"x\.parquet: field x: does not fit into memory \(malloc of size 9 failed\)",
        ):
            dump.column("x")
