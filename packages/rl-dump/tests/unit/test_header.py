"""Headers: sealed by a checksum, read by key, refused where a key is not of the contract."""

from __future__ import annotations

import json
import zlib
from typing import Any, cast

import numpy as np
import pytest

from rl_dump import DumpError, UnsupportedContractError
from rl_dump.columns.column_types import column_of
from rl_dump.contract import DumpHeader
from rl_dump.header import field_of, header_of, make_header, open_header, seal_header


def header(**changed: Any) -> dict[str, Any]:
    made = make_header(
        num_samples=2,
        fields=[column_of("x", [1, 2]).field],
        contract="train-dump.v2",
        batch_id=3,
        metadata={"a": 1},
    )
    return {**made, **changed}


def test_a_sealed_header_opens_again() -> None:
    made = cast(DumpHeader, header())
    text, crc = seal_header(made)
    assert open_header(text.encode(), crc.encode(), where="f") == made


@pytest.mark.parametrize("crc", [None, b"", b"x", b"-1", b"12"])
def test_a_header_whose_checksum_differs_is_not_read(crc: bytes | None) -> None:
    text, _ = seal_header(cast(DumpHeader, header()))
    with pytest.raises(DumpError, match="f: the header's checksum does not match"):
        open_header(text.encode(), crc, where="f")


def test_text_that_is_not_a_document_is_refused_even_with_a_checksum() -> None:
    raw = b"{not json"
    with pytest.raises(DumpError, match="f: header: not a document"):
        open_header(raw, str(zlib.crc32(raw)).encode(), where="f")


@pytest.mark.parametrize("found", [None, [], "text", 3])
def test_a_header_is_an_object(found: object) -> None:
    with pytest.raises(UnsupportedContractError, match=r"f: expected an object .*, got \w+"):
        header_of(found, where="f")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_samples", "2"),
        ("batch_id", None),
        ("fields", []),
        ("dp_shards", {}),
        ("dropped", None),
        ("writer_rank", 0.5),
    ],
)
def test_a_key_of_the_wrong_type_is_named(key: str, value: object) -> None:
    with pytest.raises(DumpError, match=f"f: header key '{key}' is missing or of the wrong type"):
        header_of(header(**{key: value}), where="f")


def test_keys_that_may_be_absent_have_defaults_and_unknown_ones_are_dropped() -> None:
    bare = {
        key: value
        for key, value in header(new_in_minor_9=1).items()
        if key not in {"dp_shards", "raw_reward", "schedule", "metadata"}
    }
    found = header_of(json.loads(json.dumps(bare)), where="f")
    assert (found["dp_shards"], found["raw_reward"], found["schedule"], found["metadata"]) == (
        [],
        None,
        None,
        {},
    )
    assert "new_in_minor_9" not in found
    with pytest.raises(DumpError, match="header key 'num_samples' is missing"):
        header_of(
            {key: value for key, value in header().items() if key != "num_samples"}, where="f"
        )
    with pytest.raises(UnsupportedContractError, match=r"train-dump\.v1"):
        header_of(header(contract="train-dump.v1"), where="f")


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "matrix"},
        {"form": "sphere"},
        {"dtype": "complex128"},
        {"dtype": "float128", "stored": "float128"},
        {"stored": "no dtype"},
        {"trailing": ["a"]},
        {"trailing": None},
        {"nullable": ...},
    ],
)
def test_a_field_outside_of_the_contract_is_refused_by_name(changed: dict[str, Any]) -> None:
    document: dict[str, Any] = {**column_of("x", [1.5]).field.to_document(), **changed}
    if changed.get("nullable") is ...:
        del document["nullable"]
    with pytest.raises(DumpError, match="f: field 'x' is described by"):
        field_of("x", cast(Any, document), where="f")


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("fields", {"x": 1}, r"fields\['x'\]"),
        ("dp_shards", [1], r"dp_shards\[0\]"),
        ("dp_shards", [{"partition": "ab"}], r"dp_shards\[0\]\.partition"),
        ("dp_shards", [{}, {"partition": [[1], [2]]}], r"dp_shards\[1\]\.partition"),
        ("dp_shards", [{"partition": [None]}], r"dp_shards\[0\]\.partition"),
        ("dp_shards", [{"partition": np.zeros((2, 2), np.int64)}], r"dp_shards\[0\]\.partition"),
        ("dp_shards", [{"data_parallel_rank": "a"}], r"dp_shards\[0\]\.data_parallel_rank"),
        ("dp_shards", [{"num_microbatches": "x"}], r"dp_shards\[0\]\.num_microbatches"),
        ("dropped", [1], r"dropped\[0\]"),
        ("dropped", [{"rollout_position": [1]}], r"dropped\[0\]\.rollout_position"),
        ("dropped", [{"reason": ["x"]}], r"dropped\[0\]\.reason"),
        ("raw_reward", [1.0, "a"], r"raw_reward\[1\]"),
        ("raw_reward", [10**400], r"raw_reward\[0\]"),
    ],
)
def test_what_stands_inside_a_key_is_checked_and_named(key: str, value: object, place: str) -> None:
    with pytest.raises(DumpError, match=f"f: header key {place} is of the wrong type"):
        header_of(header(**{key: value}), where="f")


def test_what_producers_write_passes() -> None:
    shard = {
        "rank": 0,
        "data_parallel_rank": None,
        "partition": [1, 2],
        "num_microbatches": [2, None],
        "micro_batch_indices": [[0], [1]],
    }
    arrays = {**shard, "partition": np.array([1, 2]), "global_batch_sizes": (2,)}
    dropped = [{"rollout_position": None, "sample_index": 2**80, "reason": "x"}, {}]
    assert header_of(
        header(dp_shards=[shard, arrays, {}], dropped=dropped, raw_reward=[1, 0.5, float("nan")]),
        where="f",
    )


def test_a_lone_surrogate_in_a_header_is_refused() -> None:
    with pytest.raises(DumpError, match=r"header: holds the lone surrogate U\+D800"):
        seal_header(cast(DumpHeader, header(batch_id="\ud800")))
