"""The contracts of the tree: one owner each, frozen documents, readers' copies byte for byte, schemas as package data."""

import json
from importlib import import_module, metadata
from pathlib import Path

import jsonschema
import pytest
import tomllib

from rl_runtime import contract as rollout_batch
from rl_runtime.contract_table import gaps, installed_contracts

PACKAGES = Path(__file__).parents[3]


def _entries(group: str) -> dict[str, set[str]]:
    projects = {
        path.parent.name: tomllib.loads(path.read_text())["project"]
        for path in sorted(PACKAGES.glob("*/pyproject.toml"))
    }
    return {name: set(project["entry-points"].get(group, {})) for name, project in projects.items()}


WRITES = _entries("rl.contracts.writes")
READS = _entries("rl.contracts.reads")
OWNERS = {contract: name for name, contracts in WRITES.items() for contract in contracts}
CONTRACTS = {
    "schedule-plan.v1",
    "metric-record.v1",
    "nucleus-set.v1",
    "train-dump.v2",
    "rollout-dump.v1",
    "rollout-batch.v1",
}


def golden_folder(package: str, contract: str) -> Path:
    """The folder with a package's frozen documents of one contract."""
    return PACKAGES / package / "tests" / "golden" / contract


def golden_files(package: str, contract: str) -> dict[str, Path]:
    """The frozen documents, without the note on where they come from."""
    return {
        path.name: path
        for path in sorted(golden_folder(package, contract).glob("*"))
        if path.name != "PROVENANCE.md"
    }


def test_every_contract_has_one_owner_and_readers() -> None:
    assert set(OWNERS) == CONTRACTS
    assert sum(map(len, WRITES.values())) == len(CONTRACTS)
    assert set().union(*READS.values()) == CONTRACTS


def test_the_installed_metadata_is_that_of_the_tree_and_has_no_gap() -> None:
    table = installed_contracts()
    assert table["writes"] == {contract: [owner] for contract, owner in OWNERS.items()}
    assert {contract: set(readers) for contract, readers in table["reads"].items()} == {
        contract: {name for name, contracts in READS.items() if contract in contracts}
        for contract in CONTRACTS
    }
    assert gaps(table) == []


@pytest.mark.parametrize("contract", sorted(CONTRACTS))
def test_the_owner_has_frozen_documents_and_a_schema(contract: str) -> None:
    assert golden_files(OWNERS[contract], contract)
    module = import_module(OWNERS[contract].replace("-", "_"))
    (folder,) = module.__path__
    schema = json.loads((Path(folder) / "schemas" / f"{contract}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["contract"]["const"] == contract


@pytest.mark.parametrize(
    ("package", "contract"),
    sorted((package, contract) for package, contracts in READS.items() for contract in contracts),
)
def test_a_readers_copies_are_the_owners_bytes(package: str, contract: str) -> None:
    assert "byte for byte" in (golden_folder(package, contract) / "PROVENANCE.md").read_text()
    copies, originals = golden_files(package, contract), golden_files(OWNERS[contract], contract)
    assert {name: path.read_bytes() for name, path in copies.items()} == {
        name: path.read_bytes() for name, path in originals.items()
    }


def test_every_folder_of_documents_belongs_to_an_entry_point() -> None:
    found = {
        (path.parents[2].name, path.name)
        for path in PACKAGES.glob("*/tests/golden/*.v[0-9]*")
        if path.is_dir()
    }
    assert found == {
        (package, contract)
        for table in (WRITES, READS)
        for package, contracts in table.items()
        for contract in contracts
    }


def test_every_entry_point_can_be_loaded() -> None:
    for group in ("rl.contracts.writes", "rl.contracts.reads"):
        for entry in metadata.entry_points(group=group):
            assert entry.load().__name__ == entry.value


def test_the_schema_of_the_rollout_batch_names_the_keys_of_its_typed_dict() -> None:
    schema = rollout_batch.load_schema()
    assert (
        set(schema["properties"])
        == set(schema["required"])
        == set(rollout_batch.RolloutBatchDocument.__annotations__)
    )
    assert set(WRITES["rl-runtime"]) == set(rollout_batch.WRITES)
    assert READS["rl-runtime"] == set(rollout_batch.READS)
    for path in golden_files("rl-runtime", rollout_batch.ROLLOUT_BATCH).values():
        jsonschema.validate(json.loads(path.read_text())["document"], schema)
