"""Every reader of a contract reads every frozen document of it, and refuses another major."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tomllib

import rl_dump
import rl_metrics
import rl_schedule
import rl_topp
from rl_dump import views
from rl_runtime.batch_document import columns_of_document
from rl_schedule.batch_file import read_batch
from rl_topp.parquet import stats_of_dump

PACKAGES = Path(__file__).parents[3]

Reader = Callable[[Path], object]
"""Reads one document or dump."""


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _with_arrays(read: Callable[[Mapping[str, Any], Mapping[str, Any]], object]) -> Reader:
    def run(path: Path) -> object:
        content = _json(path)
        return read(content["document"], content["arrays"])

    return run


def _nucleus_with_dtypes(path: Path) -> rl_topp.NucleusSet:
    content = _json(path)
    arrays = {
        name: np.array(values, content["document"]["arrays"][name]["dtype"])
        for name, values in content["arrays"].items()
    }
    return rl_topp.NucleusSet.from_document(content["document"], arrays)


def _lengths_of_batch(path: Path) -> rl_schedule.SchedulePlan | None:
    columns = columns_of_document(*(_json(path)[key] for key in ("document", "arrays")))
    lengths, ids = (np.asarray(columns[name]) for name in ("total_lengths", "rollout_ids"))
    if not lengths.size:
        return None
    return rl_schedule.plan_schedule(
        rl_schedule.ScheduleRequest(
            total_lengths=lengths,
            rollout_ids=ids,
            global_batch_size=2,
            dp_size=1,
            max_tokens_per_gpu=8,
        )
    )


def _whole_dump(path: Path) -> dict[str, object]:
    dump = rl_dump.open_dump(path)
    dump.verify()
    return {name: dump.column(name) for name in dump.fields}


READERS: dict[tuple[str, str], Reader] = {
    ("rl-schedule", "rollout-dump.v1"): read_batch,
    ("rl-schedule", "rollout-batch.v1"): _lengths_of_batch,
    ("rl-topp", "train-dump.v2"): stats_of_dump,
    ("rl-topp", "rollout-dump.v1"): stats_of_dump,
    ("rl-dump", "schedule-plan.v1"): lambda path: views.plan_columns(_json(path), num_samples=64),
    ("rl-dump", "metric-record.v1"): lambda path: views.metric_values(_json(path)),
    ("rl-dump", "nucleus-set.v1"): _with_arrays(views.nucleus_columns),
    ("rl-dump", "rollout-batch.v1"): _with_arrays(views.batch_columns),
    ("rl-runtime", "schedule-plan.v1"): lambda path: rl_schedule.SchedulePlan.from_document(
        _json(path)
    ),
    ("rl-runtime", "metric-record.v1"): lambda path: rl_metrics.parse_document(_json(path)),
    ("rl-runtime", "nucleus-set.v1"): _nucleus_with_dtypes,
    ("rl-runtime", "train-dump.v2"): _whole_dump,
    ("rl-runtime", "rollout-dump.v1"): _whole_dump,
}
"""How each reader named in the metadata reads a document."""

OWNERS: dict[str, Reader] = {
    "schedule-plan.v1": READERS["rl-runtime", "schedule-plan.v1"],
    "metric-record.v1": READERS["rl-runtime", "metric-record.v1"],
    "nucleus-set.v1": _nucleus_with_dtypes,
    "train-dump.v2": _whole_dump,
    "rollout-dump.v1": _whole_dump,
    "rollout-batch.v1": _with_arrays(columns_of_document),
}
"""How the owner reads its own."""


def _cases() -> dict[str, tuple[Reader, Path]]:
    """Every reader with every document of its contract, by name."""
    cases: dict[str, tuple[Reader, Path]] = {}
    readers = {**READERS, **{("owner", contract): read for contract, read in OWNERS.items()}}
    for (package, contract), read in readers.items():
        folders = sorted(PACKAGES.glob(f"*/tests/golden/{contract}"))
        for name in sorted(
            {
                path.name
                for folder in folders
                for path in folder.iterdir()
                if path.name != "PROVENANCE.md"
            }
        ):
            path = next(folder / name for folder in folders if (folder / name).exists())
            cases[f"{package}-{contract}-{name}"] = read, path
    return cases


CASES = _cases()


def test_the_readers_here_are_those_of_the_metadata() -> None:
    projects = {
        path.parent.name: tomllib.loads(path.read_text())["project"]
        for path in PACKAGES.glob("*/pyproject.toml")
    }
    named = {
        (name, contract)
        for name, project in projects.items()
        for contract in project["entry-points"].get("rl.contracts.reads", {})
    }
    assert set(READERS) == named


@pytest.mark.parametrize(("read", "path"), CASES.values(), ids=CASES)
def test_a_reader_reads_every_frozen_document(read: Reader, path: Path) -> None:
    read(path)


@pytest.mark.parametrize(("read", "path"), CASES.values(), ids=CASES)
def test_a_reader_refuses_another_major_and_names_both(
    read: Reader, path: Path, tmp_path: Path
) -> None:
    contract = path.parent.name
    other = f"{contract.rpartition('.v')[0]}.v9"
    changed = tmp_path / path.name
    if path.suffix == ".json":
        changed.write_text(path.read_text().replace(f'"{contract}"', f'"{other}"'))
    else:
        file = pq.ParquetFile(path)
        metadata = {
            key: value.replace(contract.encode(), other.encode())
            for key, value in file.metadata.metadata.items()
            if not key.startswith(b"ARROW")
        }
        pq.write_table(file.read().replace_schema_metadata(metadata), changed)
    with pytest.raises(ValueError, match=rf"{contract}|checksum"):
        read(changed)


def test_the_dump_and_the_owner_see_the_same_batch() -> None:
    content = _json(PACKAGES / "rl-runtime/tests/golden/rollout-batch.v1/three_samples.json")
    ours, theirs = (
        columns_of_document(content["document"], content["arrays"]),
        views.batch_columns(content["document"], content["arrays"]),
    )
    assert list(ours) == list(theirs)
    assert [
        list(map(list, column)) if hasattr(column, "offsets") else column.tolist()
        for column in ours.values()
    ] == [
        list(map(list, column)) if hasattr(column, "offsets") else column.tolist()
        for column in theirs.values()
    ]


def test_the_dump_places_samples_where_the_plan_runs_them() -> None:
    document = _json(PACKAGES / "rl-schedule/tests/golden/schedule-plan.v1/plain.json")
    plan = rl_schedule.SchedulePlan.from_document(document)
    columns = views.plan_columns(document, num_samples=64)
    for rank in range(plan.dp_size):
        places = [
            (step, slot)
            for step, count in enumerate(plan.num_microbatches)
            for slot in range(count)
        ]
        for (step, slot), local in zip(places, plan.micro_batch_indices[rank], strict=True):
            for position in plan.partitions[rank][local]:
                found = tuple(
                    int(columns[name][position])
                    for name in ("step", "micro_batch", "data_parallel_rank")
                )
                assert found == (step, slot, rank)
