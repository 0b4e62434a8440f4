"""The table of contracts comes from metadata alone; a gap or a mixed cluster is found and named."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_runtime.contract_table import (
    differences,
    gaps,
    installed_contracts,
    refuse_mixed_cluster,
)
from rl_runtime.errors import RuntimeSetupError
from rl_runtime.setup.doctor import Finding, Report, diagnose, report_document


def _install(
    folder: Path, name: str, version: str, *, writes: Sequence[str] = (), reads: Sequence[str] = ()
) -> None:
    """Put the dist-info folder of a distribution that does not exist into `folder`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (("rl.contracts.writes", writes), ("rl.contracts.reads", reads))
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{i} = nowhere.at_all\n" for i in ids)
            for group, ids in groups
            if ids
        )
    )


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    folder = tmp_path / "complete"
    _install(folder, "rl-dump", "1.0", writes=["train-dump.v2"], reads=["schedule-plan.v1"])
    _install(folder, "rl-runtime", "1.1", writes=["schedule-plan.v1"], reads=["train-dump.v2"])
    return folder


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    folder = tmp_path / "newer"
    _install(folder, "rl-dump", "2.0", writes=["train-dump.v3"], reads=["schedule-plan.v1"])
    _install(folder, "rl-runtime", "1.1", writes=["schedule-plan.v1"], reads=["train-dump.v2"])
    return folder


def test_the_table_names_writers_readers_and_versions_without_importing_them(
    complete: Path,
) -> None:
    assert installed_contracts([str(complete)]) == {
        "versions": {"rl-dump": "1.0", "rl-runtime": "1.1"},
        "writes": {"train-dump.v2": ["rl-dump"], "schedule-plan.v1": ["rl-runtime"]},
        "reads": {"schedule-plan.v1": ["rl-dump"], "train-dump.v2": ["rl-runtime"]},
    }


def test_a_distribution_found_twice_counts_as_it_would_be_imported(
    complete: Path, newer: Path
) -> None:
    assert installed_contracts([str(newer), str(complete)])["writes"]["train-dump.v3"] == [
        "rl-dump"
    ]
    assert "train-dump.v3" not in installed_contracts([str(complete), str(newer)])["writes"]


def test_a_complete_installation_has_no_gap(complete: Path) -> None:
    assert gaps(installed_contracts([str(complete)])) == []


def test_a_writer_of_another_major_is_a_gap_on_both_sides(newer: Path) -> None:
    read, written = gaps(installed_contracts([str(newer)]))
    assert "train-dump.v2 is read by rl-runtime 1.1" in read
    assert "train-dump.v3 is there" in read
    assert "train-dump.v3 is written by rl-dump 2.0" in written


def test_two_owners_of_one_contract_are_a_gap(complete: Path) -> None:
    _install(complete, "rl-other", "0.3", writes=["train-dump.v2"])
    (gap,) = gaps(installed_contracts([str(complete)]))
    assert "rl-dump 1.0, rl-other 0.3" in gap


@pytest.mark.parametrize("odd", ["trainer rank 0", "trainer rank 2"])
def test_a_rank_with_another_major_is_found_whichever_it_is(
    complete: Path, newer: Path, odd: str
) -> None:
    ranks = ["trainer rank 0", "trainer rank 1", "trainer rank 2"]
    tables = {
        rank: installed_contracts([str(newer if rank == odd else complete)]) for rank in ranks
    }
    found = differences(tables)
    assert found
    assert all("rl-dump 2.0" in line and "rl-dump 1.0" in line for line in found)
    assert any("train-dump.v2" in line and "train-dump.v3" in line for line in found)
    assert any(odd in line for line in found)


def test_equal_contracts_of_other_versions_are_a_mixed_cluster_too(
    complete: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "patched"
    _install(folder, "rl-dump", "1.0.1", writes=["train-dump.v2"], reads=["schedule-plan.v1"])
    _install(folder, "rl-runtime", "1.1", writes=["schedule-plan.v1"], reads=["train-dump.v2"])
    tables = {
        "driver": installed_contracts([str(complete)]),
        "trainer rank 0": installed_contracts([str(folder)]),
    }
    (found,) = differences(tables)
    assert found.startswith("trainer rank 0 has rl-dump 1.0.1, rl-runtime 1.1 where driver has")


def test_a_package_of_ours_without_contracts_counts_by_its_version(tmp_path: Path) -> None:
    for version in ("1.0", "1.1"):
        _install(tmp_path / version, "rl-metrics", version)
        _install(tmp_path / version, "numpy", version)
    tables = {version: installed_contracts([str(tmp_path / version)]) for version in ("1.0", "1.1")}
    assert tables["1.0"]["versions"] == {"rl-metrics": "1.0"}
    assert "1.1 has rl-metrics 1.1 where 1.0 has rl-metrics 1.0" in differences(tables)[0]


def test_a_mixed_cluster_is_refused_before_the_first_step(complete: Path, newer: Path) -> None:
    """Each rank is a process that sees other dist-info folders, as on a node of its own."""
    code = (
        "import json, sys; from rl_runtime.contract_table import installed_contracts;"
        " print(json.dumps(installed_contracts([sys.argv[1]])))"
    )
    tables = {}
    for rank, folder in enumerate([complete, complete, newer]):
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        tables[f"trainer rank {rank}"] = json.loads(done.stdout)
    with pytest.raises(
        RuntimeSetupError,
        match=r"trainer rank 2 writes train-dump\.v3.*trainer rank 0 writes train-dump\.v2",
    ) as caught:
        refuse_mixed_cluster(tables)
    assert "trainer rank 1" not in str(caught.value)
    del tables["trainer rank 2"]
    refuse_mixed_cluster(tables)


def test_one_table_or_none_differs_from_nothing(complete: Path) -> None:
    assert differences({}) == []
    assert differences({"driver": installed_contracts([str(complete)])}) == []


def test_a_gap_in_any_area_is_a_gap_of_the_report(complete: Path) -> None:
    table = installed_contracts([str(complete)])
    fine = Finding(area="disk", status="note", message="little left")
    assert not Report(contracts=table, findings=(fine,)).has_gap
    assert Report(
        contracts=table, findings=(fine, Finding(area="ray", status="gap", message="down"))
    ).has_gap


def test_an_unreachable_ray_cluster_is_a_gap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    (found,) = [finding for finding in diagnose(tmp_path).findings if finding.area == "ray"]
    assert found.status == "gap"
    assert "127.0.0.1:1" in found.message


def test_a_gpu_driver_that_does_not_answer_is_a_gap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexit 9\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = [finding for finding in diagnose(tmp_path).findings if finding.area == "gpus"]
    assert found.status == "gap"


def test_the_report_is_plain_json(tmp_path: Path) -> None:
    document = json.loads(json.dumps(report_document(diagnose(tmp_path))))
    assert set(document) == {"ok", "contracts", "findings"}
    assert {finding["area"] for finding in document["findings"]} == {
        "contracts",
        "versions",
        "python",
        "ports",
        "gpus",
        "ray",
        "disk",
    }


def test_the_command_exits_with_1_on_a_gap_and_imports_nothing_heavy(newer: Path) -> None:
    code = f"""
import importlib.metadata as m, sys
found = list(m.distributions(path=[{str(newer)!r}]))
m.distributions = lambda **_: found
from typer.testing import CliRunner
from rl_runtime.cli.app import app
result = CliRunner().invoke(app, ["doctor", "--json"])
assert "train-dump.v3" in result.output, result.output
assert not {{"torch", "ray", "sglang", "megatron", "transformers"}} & set(sys.modules)
sys.exit(40 + result.exit_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 41, done.stderr
