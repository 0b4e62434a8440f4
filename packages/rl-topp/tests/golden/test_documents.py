"""The frozen documents of `nucleus-set.v1`, and what a reader does with other ones."""

import json
import logging
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from rl_topp import NucleusError, NucleusSet, UnsupportedContractError, contract

jsonschema = pytest.importorskip("jsonschema")

FILES = sorted((Path(__file__).parent / "nucleus-set.v1").glob("*.json"))
SCHEMA = json.loads((files("rl_topp") / "schemas" / contract.SCHEMA_FILE).read_text())


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    content = json.loads(path.read_text())
    arrays = {name: np.array(values, contract.ARRAY_DTYPES[name]) for name, values in content["arrays"].items()}
    return content["document"], arrays


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_file_is_read_and_written_back_unchanged(path: Path) -> None:
    document, arrays = _read(path)
    jsonschema.validate(document, SCHEMA)
    nucleus = NucleusSet.from_document(document, arrays)
    written, written_arrays = nucleus.to_document()
    assert written == {**document, "producer": {**document["producer"], "version": version("rl-topp")}}
    for name, array in arrays.items():
        assert written_arrays[name].dtype == array.dtype
        assert np.array_equal(written_arrays[name], array)


def test_schema_and_typed_dict_name_the_same_keys() -> None:
    hints = get_type_hints(contract.NucleusSetDocument)
    assert set(SCHEMA["properties"]) == set(hints) == set(SCHEMA["required"])
    arrays = SCHEMA["properties"]["arrays"]["properties"]
    assert set(arrays) == set(get_type_hints(contract.NucleusSetArrays)) == set(contract.ARRAY_DTYPES)
    for name, dtype in contract.ARRAY_DTYPES.items():
        definition = SCHEMA["$defs"][arrays[name]["$ref"].rsplit("/", 1)[1]]
        assert definition["properties"]["dtype"]["const"] == dtype
    assert SCHEMA["$id"] == SCHEMA["properties"]["contract"]["const"] == contract.CONTRACT == get_args(hints["contract"])[0]


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
