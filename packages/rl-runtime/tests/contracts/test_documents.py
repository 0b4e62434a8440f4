"""The contracts of the tree: one owner each, named call sites, frozen documents, schemas."""

import ast
import json
from importlib import import_module, metadata
from pathlib import Path

import jsonschema
import pytest
import tomllib
from contracts.call_sites import PACKAGES, READERS, WRITERS, Site, golden_files

from rl_runtime.contract_table import READS_GROUP, WRITES_GROUP, gaps, installed_contracts

CONTRACTS = ["rollout-dump.v1", "schedule-plan.v1", "train-dump.v2"]


def _entries(group: str) -> dict[tuple[str, str], str]:
    """Entry points of the tree, by package and contract id."""
    projects = {
        path.parent.name: tomllib.loads(path.read_text())["project"]
        for path in sorted(PACKAGES.glob("*/pyproject.toml"))
    }
    return {
        (name, contract): value
        for name, project in projects.items()
        for contract, value in project.get("entry-points", {}).get(group, {}).items()
    }


WRITES, READS = _entries(WRITES_GROUP), _entries(READS_GROUP)
OWNERS = {contract: package for package, contract in WRITES}


def test_every_contract_has_one_owner_and_a_reader_in_another_package() -> None:
    assert sorted(OWNERS) == CONTRACTS
    assert len(WRITES) == len(OWNERS)
    assert {contract for _, contract in READS} == set(OWNERS)
    assert all(OWNERS[contract] != package for package, contract in READS)


def test_the_page_names_the_writers_and_readers_of_the_metadata() -> None:
    assert {(site.package, site.contract) for site in WRITERS} == set(WRITES)
    assert {(site.package, site.contract) for site in READERS} == set(READS)
    for site in READERS:
        assert READS[site.package, site.contract].partition(":")[0] == site.module


@pytest.mark.parametrize("site", [*WRITERS, *READERS], ids=lambda site: site.name)
def test_a_call_site_exists_and_says_what_it_does(site: Site) -> None:
    assert callable(site.load())
    assert site.load().__doc__


@pytest.mark.parametrize("value", sorted({*WRITES.values(), *READS.values()}))
def test_every_entry_point_can_be_loaded(value: str) -> None:
    metadata.EntryPoint(name="contract", value=value, group=READS_GROUP).load()


def test_the_installed_metadata_is_that_of_the_tree_and_has_no_gap() -> None:
    table = installed_contracts()
    assert table["writes"] == {contract: [owner] for contract, owner in OWNERS.items()}
    assert table["reads"] == {
        contract: sorted(package for package, read in READS if read == contract)
        for contract in CONTRACTS
    }
    assert gaps(table) == []


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_owner_has_frozen_documents_and_a_schema(contract: str) -> None:
    assert golden_files(OWNERS[contract], contract)
    module = import_module(OWNERS[contract].replace("-", "_"))
    (folder,) = module.__path__
    schema = json.loads((Path(folder) / "schemas" / f"{contract}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["contract"]["const"] == contract


@pytest.mark.parametrize(("package", "contract"), sorted(READS))
def test_a_readers_copies_are_the_owners_bytes(package: str, contract: str) -> None:
    copies, originals = golden_files(package, contract), golden_files(OWNERS[contract], contract)
    note = next(iter(copies.values())).parent / "PROVENANCE.md"
    assert "byte for byte" in note.read_text()
    assert {name: path.read_bytes() for name, path in copies.items()} == {
        name: path.read_bytes() for name, path in originals.items()
    }


def test_every_folder_of_documents_belongs_to_an_entry_point() -> None:
    found = {
        (path.parents[2].name, path.name)
        for path in PACKAGES.glob("*/tests/golden/*.v[0-9]*")
        if path.is_dir()
    }
    assert found == {*WRITES, *READS}


def test_the_machinery_of_contracts_is_the_same_bytes_wherever_it_is() -> None:
    copies = sorted(PACKAGES.glob("*/src/*/contract_header.py"))
    assert [path.parent.name for path in copies] == ["rl_dump", "rl_schedule", "rl_topp"]
    assert len({path.read_bytes() for path in copies}) == 1


def test_no_other_module_defines_the_error_of_an_unsupported_contract() -> None:
    definitions = [
        path.name
        for path in PACKAGES.glob("*/src/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name == "UnsupportedContractError"
    ]
    assert definitions == ["contract_header.py"] * 3
