"""Documents of the other packages, as vendored here: what a dump takes of each, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stubs.dump_batches import equal

from rl_dump import DumpError, UnsupportedContractError, views, write_dump
from rl_dump.reader import open_dump

FOLDER = Path(__file__).parent


def document(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def with_arrays(name: str, view: Callable[[Any, Any], Any]) -> Any:
    content = document(name)
    return view(content["document"], content["arrays"])


def test_a_plan_says_where_each_sample_runs_and_what_it_drops() -> None:
    plan = document("schedule-plan.v1/plain.json")
    columns = views.plan_columns(plan, num_samples=11)
    assert columns["data_parallel_rank"].tolist() == [0, 3, 1, 2, 1, 2, 0, 2, 0, 1, -1]
    assert columns["step"][[0, 6, 8]].tolist() == [0, 1, 2]
    assert views.plan_dropped(plan) == [10]
    assert views.plan_fillers(plan) == [(3, 1), (3, 2)]
    assert (
        views.plan_columns(document("schedule-plan.v1/empty.json"), num_samples=0)["step"].tolist()
        == []
    )


def test_a_plan_of_another_batch_is_refused() -> None:
    with pytest.raises(DumpError, match="has position 9, but the batch has 5 samples"):
        views.plan_columns(document("schedule-plan.v1/plain.json"), num_samples=5)


def test_kept_sets_and_metrics_become_columns_and_numbers() -> None:
    kept = with_arrays("nucleus-set.v1/every_status.json", views.nucleus_columns)
    assert {name: (array.dtype.name, len(array)) for name, array in kept.items()} == {
        "nucleus_ids": ("int32", 5),
        "nucleus_offsets": ("int64", 6),
        "nucleus_status": ("uint8", 5),
    }
    values = views.metric_values(document("metric-record.v1/every_kind.json"))
    assert values["train/loss"] == 0.32
    assert values["rollout/reward"] == 3.0
    assert values["train/kl"] is None
    assert "rollout/response_tokens" not in values


def test_a_batch_can_be_dumped_as_it_came(tmp_path: Path) -> None:
    columns = with_arrays("rollout-batch.v1/three_samples.json", views.batch_columns)
    path = write_dump(tmp_path / "x.parquet", contract="train-dump.v2", batch_id=4, columns=columns)
    with open_dump(path) as dump:
        for name, column in columns.items():
            assert equal(dump.column(name), column)


VIEWS: dict[str, Callable[[Any], object]] = {
    "schedule-plan.v1/plain.json": lambda content: views.plan_columns(content, 99),
    "metric-record.v1/every_kind.json": views.metric_values,
    "nucleus-set.v1/every_status.json": lambda content: views.nucleus_columns(
        content["document"], content["arrays"]
    ),
    "rollout-batch.v1/three_samples.json": lambda content: views.batch_columns(
        content["document"], content["arrays"]
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_another_major_is_refused_naming_both_and_a_newer_minor_is_read(name: str) -> None:
    contract = name.partition("/")[0]
    content = document(name)
    inner = content.get("document", content)
    VIEWS[name](
        {
            **content,
            **({"document": {**inner, "minor": 7}} if "document" in content else {"minor": 7}),
        }
    )
    inner["contract"] = "other.v9"
    with pytest.raises(UnsupportedContractError, match=rf"'other\.v9', .*'{contract}'"):
        VIEWS[name](content)


@pytest.mark.parametrize("name", VIEWS)
def test_a_document_that_lacks_what_is_needed_is_refused(name: str) -> None:
    content = document(name)
    inner = content.get("document", content)
    content.pop("arrays", None)
    content["arrays"] = {}
    inner.pop("records", None)
    with pytest.raises(DumpError):
        VIEWS[name](content)
