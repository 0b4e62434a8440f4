"""`schedule-plan.v1`: schema, round trip, and what a reader refuses."""

import copy
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from typing import Any, get_type_hints

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule import contract
from rl_schedule.contract_header import _log_newer_minor, load_schema
from rl_schedule.request import SETTING_NAMES

PLAN = rs.build_dp_schedule(
    total_lengths=[4, 9, 2, 5, 1],
    rollout_ids=[0, 1, 2, 3, 4],
    global_batch_size=4,
    dp_size=3,
    max_tokens_per_gpu=6,
)


def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(PLAN.to_document()))
    return found


def broken(path: list[Any], value: Any) -> dict[str, Any]:
    """Return the document with one value replaced, or removed where `value` is `...`."""
    found = document()
    place = found
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return found


def test_the_header_names_contract_and_producer() -> None:
    found = document()
    assert (found["contract"], found["minor"]) == ("schedule-plan.v1", 1)
    assert found["producer"]["distribution"] == "rl-schedule"
    assert found["arrays"]["filler_micro_batches"]["shape"] == [0, 2]


def test_round_trip_is_exact() -> None:
    again = rs.SchedulePlan.from_document(document())
    assert again == PLAN
    assert again.to_document() == PLAN.to_document()


def _keys(kind: Any, schema: dict[str, Any], path: str) -> list[tuple[str, set[str], set[str]]]:
    """Pair the keys of a TypedDict with the required keys of its schema, recursively."""
    found = [(path, set(kind.__annotations__), set(schema["required"]))]
    for name, hint in get_type_hints(kind).items():
        part = schema["properties"][name]
        if hasattr(hint, "__annotations__") and "properties" in part:
            found += _keys(hint, part, f"{path}.{name}")
    return found


def test_schema_and_records_have_the_same_keys() -> None:
    schema = load_schema(contract.CONTRACT_ID)
    parts = schema["properties"]
    pairs = _keys(contract.SchedulePlanDocument, schema, "document")
    pairs[0] = ("document", set(contract.SchedulePlanDocument.__required_keys__), pairs[0][2])
    assert set(contract.SchedulePlanDocument.__annotations__) == set(parts)
    assert set(SETTING_NAMES) == set(parts["settings"]["properties"])
    pairs += [
        ("settings", set(contract.SETTINGS_OF_MINOR_0), set(parts["settings"]["required"])),
        ("settings.cost", *_keys(contract.CostDocument, _cost(parts), "")[0][1:]),
        ("stats", set(_names(rs.ScheduleStats)), set(parts["stats"]["required"])),
        (
            "step",
            set(_names(rs.StepStats)),
            set(parts["stats"]["properties"]["steps"]["items"]["required"]),
        ),
    ]
    assert len(pairs) >= 14
    for path, keys, required in pairs:
        assert keys == required, path
    assert tuple(parts["arrays"]["properties"]) == contract.ARRAY_NAMES


def _cost(parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = parts["settings"]["properties"]["cost"]
    return found


def _names(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def test_documents_satisfy_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(load_schema(contract.CONTRACT_ID))
    assert list(validator.iter_errors(document())) == []
    assert (
        list(validator.iter_errors(broken(["arrays", "sample_positions", "dtype"], "int32"))) != []
    )


@pytest.mark.parametrize("other", ["schedule-plan.v2", "train-dump.v2", None])
def test_another_contract_is_refused_with_both_ids(other: Any) -> None:
    with pytest.raises(rs.UnsupportedContractError) as caught:
        rs.SchedulePlan.from_document(broken(["contract"], other))
    assert "schedule-plan.v1" in str(caught.value)
    assert repr(other) in str(caught.value)


def test_a_newer_minor_is_read_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _log_newer_minor.cache_clear()
    newer = {**broken(["minor"], 7), "colour": "blue"}
    newer["stats"]["steps"][0]["flavour"] = 3
    with caplog.at_level(logging.WARNING, logger="rl_schedule"):
        assert rs.SchedulePlan.from_document(newer) == PLAN
        assert rs.SchedulePlan.from_document(newer) == PLAN
    assert caplog.text.count("minor 7") == 1


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["minor"], -1, "minor"),
        (["dp_size"], 0, "dp_size"),
        (["dp_size"], True, "dp_size"),
        (["digest"], 5, "digest"),
        (["settings"], [], "settings must be an object"),
        (["settings", "cp_size"], ..., "settings lacks 'cp_size'"),
        (["stats", "fill"], ..., "stats lacks 'fill'"),
        (["stats", "steps"], 3, "stats.steps must be a list"),
        (["stats", "steps", 0], 3, "stats.steps[0] must be an object"),
        (["stats", "steps", 0, "path"], ..., "stats.steps[0] lacks 'path'"),
        (["arrays"], 3, "arrays must be an object"),
        (["arrays", "sample_positions"], ..., "arrays.sample_positions is missing"),
        (
            ["arrays", "sample_positions", "dtype"],
            "int32",
            "arrays.sample_positions must have dtype int64",
        ),
        (
            ["arrays", "sample_positions", "shape"],
            [4, 1],
            "arrays.sample_positions must have a shape of 1",
        ),
        (["arrays", "sample_positions", "shape"], [5], "arrays.sample_positions has 4 values"),
        (
            ["arrays", "sample_positions", "data"],
            [0, 1, 2, 3.5],
            "arrays.sample_positions must hold",
        ),
        (
            ["arrays", "sample_positions", "data"],
            [0, 1, 2, True],
            "arrays.sample_positions must hold",
        ),
        (
            ["arrays", "sample_positions", "data"],
            [0, 1, 2, 2**63],
            "arrays.sample_positions must hold",
        ),
        (["arrays", "micro_batch_offsets", "data", 0], 1, "micro_batch_offsets must rise"),
        (["arrays", "num_microbatches", "data", 0], 9, "micro_batch_offsets has"),
        (
            ["arrays", "global_batch_sizes"],
            {"dtype": "int64", "shape": [0], "data": []},
            "global_batch_sizes has 0 steps",
        ),
        (
            ["arrays", "filler_micro_batches", "shape"],
            [0, 3],
            "filler_micro_batches must have shape",
        ),
        (["digest"], "0" * 64, "altered"),
        (["arrays", "sample_positions", "data", 0], 99, "altered"),
    ],
)
def test_a_faulty_document_says_what_is_wrong(path: list[Any], value: Any, words: str) -> None:
    with pytest.raises(rs.PlanDocumentError) as caught:
        rs.SchedulePlan.from_document(broken(path, value))
    assert words in str(caught.value)


ALTERED: list[tuple[list[Any], Any, str]] = [
    (["settings", "max_tokens_per_gpu"], 99999, "settings_digest"),
    (["settings", "max_tokens_per_gpu"], 99999, "altered"),
    (["settings", "dp_size"], 99, "settings.dp_size is 99, the plan is for 3 ranks"),
    (["settings", "dp_size"], "3", "dp_size"),
    (["settings", "cp_size"], 0, "cp_size must be >= 1"),
    (["settings", "balance"], "speed", "balance"),
    (["settings", "rank_slack"], 2.5, "rank_slack"),
    (["settings", "rank_slack"], "much", "rank_slack"),
    (["settings", "cost"], {"kind": "alien", "parameters": {}}, "settings.cost"),
    (["settings", "cost"], {"kind": "quadratic", "parameters": 3}, "settings.cost"),
    (["settings", "splitter"], 7, "settings.splitter"),
    (["settings", "global_batch_size"], "4", "settings.global_batch_size"),
    (["settings", "global_batch_size"], [4, 0], "settings.global_batch_size"),
    (["settings", "on_oversized"], None, "on_oversized"),
    (["settings", "micro_batch_size"], 4, "both"),
    (["settings", "pad_to_multiple"], 2.5, "pad_to_multiple"),
    (["settings", "equal_samples"], "yes", "equal_samples"),
    (["settings", "extra_micro_batches"], 2, "extra_micro_batches"),
    (["settings", "pad_to_longest"], 1, "pad_to_longest"),
    (["settings", "max_samples_per_micro_batch"], 0, "max_samples_per_micro_batch"),
    (["settings_digest"], "0" * 64, "settings_digest"),
    (["settings_digest"], ..., "settings_digest"),
    (["rollout_names"], "ab", "rollout_names"),
    (["rollout_names"], [1], "rollout_names"),
    (["stats", "fill"], "lots", "stats.fill must be a number >= 0 or null"),
    (["stats", "rank_imbalance"], None, "stats.rank_imbalance"),
    (["stats", "micro_batches"], 1.5, "stats.micro_batches"),
    (["stats", "wall_seconds"], True, "stats.wall_seconds"),
    (["stats", "steps", 0, "path"], 3, "stats.steps[0].path must be a string"),
    (["stats", "steps", 0, "num_tokens"], -1, "stats.steps[0].num_tokens"),
    (["stats", "steps", 0, "rank_slack"], [], "stats.steps[0].rank_slack"),
]
"""Places of a document, a value that may not stand there, and a word of the refusal."""

CONSISTENT_BY_SCHEMA = {"settings_digest", "dp_size is 99", "altered", "both"}
"""Refusals that a schema cannot state: they compare values."""


@pytest.mark.parametrize(("path", "value", "words"), ALTERED)
def test_altered_settings_and_figures_are_refused(path: list[Any], value: Any, words: str) -> None:
    with pytest.raises(rs.PlanDocumentError) as caught:
        rs.SchedulePlan.from_document(broken(path, value))
    assert words in str(caught.value)


@pytest.mark.parametrize(("path", "value", "words"), ALTERED)
def test_schema_and_records_refuse_the_same_values(path: list[Any], value: Any, words: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    if any(word in words for word in CONSISTENT_BY_SCHEMA) or words == "settings.cost":
        return
    validator = jsonschema.Draft202012Validator(load_schema(contract.CONTRACT_ID))
    assert list(validator.iter_errors(broken(path, value))) != []


def as_minor_0(found: dict[str, Any]) -> dict[str, Any]:
    """A document as the first version wrote it."""
    old = copy.deepcopy(found)
    old["minor"] = 0
    del old["settings_digest"], old["rollout_names"]
    for name in set(old["settings"]) - set(contract.SETTINGS_OF_MINOR_0):
        del old["settings"][name]
    return old


def test_a_document_of_the_first_minor_is_read() -> None:
    assert rs.SchedulePlan.from_document(as_minor_0(document())) == PLAN


def test_another_cap_in_a_document_of_the_first_minor_does_not_fit_its_figures() -> None:
    """15 tokens in 2 micro-batches of 3 ranks under 6 tokens are 0.42 of the room."""
    for name, value in (("max_tokens_per_gpu", 99999), ("cp_size", 2)):
        old = as_minor_0(document())
        old["settings"][name] = value
        with pytest.raises(rs.PlanDocumentError, match=r"stats\.steps\[0\]\.fill"):
            rs.SchedulePlan.from_document(old)


def test_figures_of_other_micro_batches_are_refused() -> None:
    other = document()
    other["stats"]["steps"][0]["micro_batches"] += 1
    with pytest.raises(rs.PlanDocumentError, match="num_microbatches"):
        rs.SchedulePlan.from_document(other)


def test_the_digest_leaves_settings_out_and_the_settings_have_one_of_their_own() -> None:
    """sha256 of the text that `json.dumps` with sorted keys and no spaces gives."""
    text = json.dumps(PLAN.settings, sort_keys=True, separators=(",", ":"))
    assert document()["settings_digest"] == hashlib.sha256(text.encode()).hexdigest()
    again = dataclasses.replace(PLAN, settings={**PLAN.settings, "on_trailing": "error"})
    assert again.digest == PLAN.digest
    assert again.to_document()["settings_digest"] != document()["settings_digest"]


def test_a_document_shares_nothing_with_its_plan() -> None:
    found = PLAN.to_document()
    read = rs.SchedulePlan.from_document(found)
    found["settings"]["cost"]["kind"] = "spoilt"
    assert PLAN.settings["cost"]["kind"] == read.settings["cost"]["kind"] == "quadratic"


def test_numbers_of_numpy_in_a_cost_model_are_plain_in_the_document() -> None:
    plan = rs.build_dp_schedule(
        total_lengths=[4],
        rollout_ids=[0],
        global_batch_size=1,
        dp_size=1,
        max_tokens_per_gpu=6,
        cost=rs.QuadraticCost(linear=np.int64(3)),  # type: ignore[arg-type]
    )
    again = rs.SchedulePlan.from_document(json.loads(json.dumps(plan.to_document())))
    assert again.settings["cost"]["parameters"] == {"linear": 3, "quadratic": 1}


def test_all_faults_are_reported_at_once() -> None:
    faulty = copy.deepcopy(document())
    faulty["dp_size"], faulty["digest"] = 0, None
    del faulty["arrays"]["sample_positions"]
    with pytest.raises(rs.PlanDocumentError) as caught:
        rs.SchedulePlan.from_document(faulty)
    assert len(caught.value.problems) == 3


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a document, objects and lists among them."""
    if path:
        yield path
    items: Any = enumerate(value) if isinstance(value, list) else ()
    for key, entry in value.items() if isinstance(value, dict) else items:
        yield from _leaves(entry, (*path, key))


@pytest.mark.parametrize(
    "value",
    [None, True, -1, 0, 1, 2**70, 10**400, 1.5, float("nan"), "", "x", [], [1], {}, {1: 2}, b"x"],
    ids=lambda value: repr(value)[:30],
)
def test_whatever_stands_in_a_document_only_errors_of_this_package_leave_it(value: Any) -> None:
    for path in _leaves(document()):
        try:
            rs.SchedulePlan.from_document(broken(list(path), value))
        except (rs.PlanDocumentError, rs.UnsupportedContractError) as error:
            assert str(error)


def test_what_is_no_object_is_no_document() -> None:
    with pytest.raises(rs.PlanDocumentError, match="list"):
        rs.SchedulePlan.from_document([])  # type: ignore[arg-type]
