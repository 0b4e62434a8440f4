"""The contract's types and its JSON Schemas say the same, and other contracts are refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from stubs.dump_batches import Pair

from rl_dump import DumpError, UnsupportedContractError, open_dump
from rl_dump.columns import tagged_json
from rl_dump.columns.fields import Field
from rl_dump.contract import (
    CONTRACTS,
    FIELD_RULES,
    MINOR,
    DroppedSample,
    DumpHeader,
    FieldDocument,
)
from rl_dump.contract_header import Producer, load_schema
from rl_dump.header import field_of, header_of

jsonschema = pytest.importorskip("jsonschema")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_schema_and_types_name_the_same_keys(contract: str) -> None:
    document = load_schema(contract)
    assert set(document["properties"]) == set(DumpHeader.__annotations__)
    assert set(document["$defs"]["field"]["properties"]) == set(FieldDocument.__annotations__)
    assert set(document["$defs"]["dropped"]["properties"]) == set(DroppedSample.__annotations__)
    assert set(document["properties"]["producer"]["properties"]) == set(Producer.__annotations__)
    optional = set(document["properties"]) - set(document["required"])
    assert all("default" in document["properties"][key] for key in optional)


def test_written_headers_satisfy_their_schema(pair: Pair) -> None:
    for path in pair:
        with open_dump(path) as dump:
            header = json.loads(tagged_json.dumps(dict(dump.header)))
            jsonschema.validate(header, load_schema(dump.contract))


@pytest.fixture
def header(pair: Pair) -> dict[str, Any]:
    with open_dump(pair[1]) as dump:
        return dict(dump.header)


def test_another_major_is_refused_naming_both_ids_and_the_fix(header: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedContractError,
        match=(
            r"x\.parquet: .* 'train-dump\.v3' .*'train-dump\.v2' or 'rollout-dump\.v1' here: "
            r".* install"
        ),
    ):
        header_of({**header, "contract": "train-dump.v3"}, where="x.parquet")


def test_another_major_is_a_value_error_but_no_damage() -> None:
    assert issubclass(UnsupportedContractError, ValueError)
    assert not issubclass(UnsupportedContractError, DumpError)


@pytest.mark.parametrize("minor", [None, "0", -1, True])
def test_a_minor_that_is_not_a_number_is_refused(header: dict[str, Any], minor: object) -> None:
    with pytest.raises(DumpError, match=r"header key .?minor"):
        header_of({**header, "minor": minor}, where="x")


def test_a_newer_minor_is_read_with_one_log_line_and_unknown_keys_ignored(
    header: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    newer = {**header, "minor": MINOR + 5, "key_of_the_future": [1]}
    with caplog.at_level(logging.WARNING, "rl_dump"):
        for _ in range(2):
            found = header_of(newer, where="x")
    assert "key_of_the_future" not in found
    (record,) = caplog.records
    assert record.getMessage() == (
        f"train-dump.v2: minor {MINOR + 5} is newer than {MINOR}; keys that this version does not"
        " know are ignored"
    )


def test_field_documents_and_fields_are_inverse() -> None:
    field = Field(
        name="x",
        kind="ragged",
        dtype="bfloat16",
        stored="float32",
        trailing=(2, 3),
        nullable=True,
        response_aligned=True,
        form="tensor",
    )
    assert field_of("x", field.to_document(), where="here") == field


def test_every_field_of_the_contract_has_a_rule_of_a_known_shape() -> None:
    assert {rule.shape for rule in FIELD_RULES.values()} == {"[]", "[L]", "[R]", "[R+1]", "[nnz]"}
    assert FIELD_RULES["tokens"].dtype == "int64"
    assert FIELD_RULES["loss_masks"].dtype == "int32"
