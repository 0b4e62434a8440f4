"""The frozen documents of `nucleus-set.v1`, and what a reader does with other ones."""

import json
import logging
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import numpy as np
import pytest

from rl_topp import NucleusError, NucleusSet, UnsupportedContractError, contract

jsonschema = pytest.importorskip("jsonschema")

FILES = sorted((Path(__file__).parent / "nucleus-set.v1").glob("*.json"))
SCHEMA = json.loads((files("rl_topp") / "schemas" / contract.SCHEMA_FILE).read_text())


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    content = json.loads(path.read_text())
    arrays = {
        name: np.array(values, contract.ARRAY_DTYPES[name])
        for name, values in content["arrays"].items()
    }
    return content["document"], arrays


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_file_is_read_and_written_back_unchanged(path: Path) -> None:
    document, arrays = _read(path)
    jsonschema.validate(document, SCHEMA)
    nucleus = NucleusSet.from_document(document, arrays)
    written, written_arrays = nucleus.to_document()
    assert written == {
        **document,
        "producer": {**document["producer"], "version": version("rl-topp")},
    }
    for name, array in arrays.items():
        assert written_arrays[name].dtype == array.dtype
        assert np.array_equal(written_arrays[name], array)


def test_schema_and_typed_dict_name_the_same_keys() -> None:
    hints = get_type_hints(contract.NucleusSetDocument)
    assert set(SCHEMA["properties"]) == set(hints) == set(SCHEMA["required"])
    arrays = SCHEMA["properties"]["arrays"]["properties"]
    assert (
        set(arrays) == set(get_type_hints(contract.NucleusSetArrays)) == set(contract.ARRAY_DTYPES)
    )
    for name, dtype in contract.ARRAY_DTYPES.items():
        definition = SCHEMA["$defs"][arrays[name]["$ref"].rsplit("/", 1)[1]]
        assert definition["properties"]["dtype"]["const"] == dtype
    assert (
        SCHEMA["$id"]
        == SCHEMA["properties"]["contract"]["const"]
        == contract.CONTRACT
        == get_args(hints["contract"])[0]
    )


def test_another_contract_is_refused_by_both_names() -> None:
    document, arrays = _read(FILES[0])
    with pytest.raises(UnsupportedContractError, match=r"nucleus-set\.v2.*nucleus-set\.v1"):
        NucleusSet.from_document({**document, "contract": "nucleus-set.v2"}, arrays)


def test_a_newer_minor_is_read_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    document, arrays = _read(FILES[0])
    newer = {**document, "minor": 97, "added_later": True}
    with caplog.at_level(logging.WARNING, logger="rl_topp.contract"):
        assert NucleusSet.from_document(newer, arrays) == NucleusSet.from_document(document, arrays)
        NucleusSet.from_document(newer, arrays)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_missing_pieces_are_listed_together() -> None:
    document, arrays = _read(FILES[0])
    del arrays["ids"], arrays["status"]
    with pytest.raises(NucleusError) as caught:
        NucleusSet.from_document({**document, "vocab_size": None}, arrays)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("name", "description", "words"),
    [
        ("ids", {"dtype": "int32", "shape": [99]}, r"shape \[99\]"),
        ("status", {"dtype": "float32", "shape": [1]}, "dtype 'float32'"),
        ("offsets", [2], "object, got list"),
    ],
)
def test_arrays_other_than_the_document_declares_are_refused(
    name: str, description: Any, words: str
) -> None:
    document, arrays = _read(FILES[0])
    with pytest.raises(NucleusError, match=words):
        NucleusSet.from_document(
            {**document, "arrays": {**document["arrays"], name: description}}, arrays
        )


def test_offsets_that_wrap_around_are_refused() -> None:
    document, _ = _read(FILES[0])
    wrapped = {
        "ids": np.array([1, 2, 3]),
        "offsets": np.array([0, 2**63 - 1, -2, 3]),
        "status": np.zeros(3, np.uint8),
    }
    with pytest.raises(NucleusError, match="to -2"):
        NucleusSet.from_document(
            {name: value for name, value in document.items() if name != "arrays"}, wrapped
        )


def test_something_else_than_an_object_is_refused() -> None:
    _, arrays = _read(FILES[0])
    with pytest.raises(UnsupportedContractError, match="NoneType"):
        NucleusSet.from_document(cast(Any, None), arrays)
