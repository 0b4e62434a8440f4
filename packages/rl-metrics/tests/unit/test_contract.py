"""The contract: schema and types agree, every problem is reported at once, other majors are refused, newer minors are read."""

import json
import logging
from typing import Any, get_args, get_type_hints

import pytest

from rl_metrics import (
    Metric,
    MetricsError,
    UnsupportedContractError,
    contract,
    parse_document,
    to_document,
)
from rl_metrics.contract import validate_document

jsonschema = pytest.importorskip("jsonschema")


def _document(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        json.dumps(to_document([Metric.of_histogram("h", [1.0, -2.0]), Metric.of_sum("s", 1)]))
    )
    return document | changes


def test_the_schema_and_the_types_have_the_same_keys() -> None:
    schema = contract.load_schema()
    definitions = schema["$defs"]
    for typed, described in (
        (contract.MetricDocument, schema),
        (contract.MetricRecord, definitions["record"]),
        (contract.SketchRecord, definitions["sketch"]),
        (contract.Producer, schema["properties"]["producer"]),
    ):
        assert set(get_type_hints(typed)) == set(described["properties"])
        assert set(typed.__required_keys__) == set(described["required"])
    assert definitions["record"]["properties"]["kind"]["enum"] == list(get_args(contract.Kind))
    assert schema["properties"]["contract"]["const"] == contract.CONTRACT_ID == schema["$id"]


def test_the_header_names_the_writer() -> None:
    document = to_document([])
    assert (document["contract"], document["minor"]) == ("metric-record.v1", 0)
    assert document["producer"]["distribution"] == "rl-metrics"
    assert contract.is_document(document)


def test_another_contract_is_refused_with_both_ids_and_the_fix() -> None:
    with pytest.raises(
        UnsupportedContractError,
        match=r"'metric-record.v2', this reader knows 'metric-record.v1': write it",
    ):
        parse_document(_document(contract="metric-record.v2"))
    assert not contract.is_document(_document(contract="metric-record.v2"))


def test_a_newer_minor_is_read_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(parse_document(_document(minor=77, unheard_of=1))) == 2
    assert len([record for record in caplog.records if "minor version 77" in record.message]) == 1


BROKEN = [
    ({"name": ""}, "'name' must be a non-empty string"),
    ({"kind": "median"}, "'kind' is 'median'"),
    ({"unit": None}, "'unit' must be a string"),
    ({"numerator": "nan"}, "'numerator' must be a number"),
    ({"weight": -1}, "'weight' must be a finite number"),
    ({"m2": "x"}, "'m2' and 'stamp' must be numbers"),
    ({"m2": 1.0}, "m2 is 1.0"),
    ({"kind": "moments", "m2": -1.0}, "m2 is -1.0"),
    ({"stamp": 3.0}, "stamp is 3.0"),
    ({"kind": "last", "stamp": "NaN"}, "stamp is nan"),
    ({"kind": "mean", "numerator": 5.0, "weight": 0}, "numerator is 5.0 under weight 0"),
    ({"kind": "min", "numerator": 0, "weight": 0}, "numerator is 0.0 under weight 0"),
    ({"kind": "max", "numerator": "Infinity", "weight": 0}, "numerator is inf under weight 0"),
    ({"kind": "moments", "numerator": 0, "weight": 0, "m2": 2}, "m2 is 2.0"),
    ({"name": []}, "'name' must be a non-empty string"),
    ({"kind": []}, "'kind' is []"),
    ({"kind": "histogram"}, "needs an object 'sketch'"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_code_and_schema_refuse_the_same_records(changes: dict[str, Any], message: str) -> None:
    document = _document()
    document["records"][1] |= changes
    (problem,) = contract.validate_document(document)
    assert message in problem
    assert problem.startswith("record 1 (")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, contract.load_schema())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_error": 1.5}, "between 1e-12 and 1"),
        ({"zero": None}, "must be weights"),
        ({"positive_counts": []}, "lists of equal length"),
        ({"negative_counts": [-1.0]}, "must be weights"),
        ({"negative_indices": [2**70]}, "must ascend"),
        ({"negative_counts": [10**400]}, "must be weights"),
        ({"zero": 10**400}, "must be weights"),
    ],
)
def test_broken_sketches_are_named(changes: dict[str, Any], message: str) -> None:
    document = _document()
    document["records"][0]["sketch"] |= changes
    (problem,) = contract.validate_document(document)
    assert message in problem


def test_all_problems_are_reported_at_once() -> None:
    document = _document(minor=-1, producer={"distribution": "x"})
    document["records"] = [{"name": "a"}, 3, *document["records"], document["records"][0]]
    with pytest.raises(MetricsError) as caught:
        parse_document(document)
    for part in (
        "'minor' must be",
        "'producer' must be",
        "record 0 ('a'): 'kind'",
        "record 1 must be an object",
        "the name appears twice",
    ):
        assert part in str(caught.value)


def test_a_document_holds_each_name_once() -> None:
    with pytest.raises(MetricsError, match=r"more than once: \['s'\]"):
        to_document([Metric.of_sum("s", 1), Metric.of_sum("s", 2)])


@pytest.mark.parametrize("given", ["nope", None, 3, [], [("contract", contract.CONTRACT_ID)]])
def test_what_is_no_mapping_is_no_document(given: Any) -> None:
    assert not contract.is_document(given)
    for read in (parse_document, contract.validate_document, contract.check_contract):
        with pytest.raises(
            UnsupportedContractError,
            match=r"is a JSON object: give the mapping that json.loads makes of it",
        ):
            read(given)


def test_a_number_beyond_float64_is_a_problem_and_no_crash() -> None:
    document = _document()
    document["records"][1] |= {"numerator": 10**400, "weight": 10**400}
    assert contract.validate_document(document) == [
        "record 1 ('s'): 'numerator' must be a number",
        "record 1 ('s'): 'weight' must be a finite number that is not negative",
    ]


@pytest.mark.parametrize(
    ("kind", "numerator"),
    [("mean", 0), ("min", "Infinity"), ("max", "-Infinity"), ("moments", 0), ("last", 0)],
)
def test_records_without_data_are_valid_by_code_and_schema(kind: str, numerator: Any) -> None:
    document = _document()
    document["records"][1] |= {"kind": kind, "numerator": numerator, "weight": 0}
    jsonschema.validate(document, contract.load_schema())
    assert parse_document(document)[1].value is None


def test_only_metrics_are_written() -> None:
    wrong: Any = [3.0]
    with pytest.raises(MetricsError, match="a metric: got float"):
        to_document(wrong)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"relative_error": 1e-13}, "'relative_error' must lie between 1e-12 and 1"),
        (
            {"positive_indices": [2**62], "positive_counts": [1.0]},
            "'positive_indices' must lie in -35488..35488",
        ),
        (
            {"negative_indices": [-(2**62)], "negative_counts": [1.0]},
            "'negative_indices' must lie in -35488..35488",
        ),
        ({"zero": 3.0}, "weight is 2.0 but the sketch holds 5.0"),
        ({"positive_counts": [1e308, 1e308]}, "weight is 2.0 but the sketch holds inf"),
    ],
)
def test_sketches_that_contradict_float64_or_their_record_are_named(
    changes: dict[str, Any], told: str
) -> None:
    document: Any = to_document([Metric.of_histogram("a", [1.0, 2.0])])
    document["records"][0]["sketch"].update(changes)
    (problem,) = validate_document(document)
    assert told in problem
    with pytest.raises(MetricsError, match="record 0"):
        parse_document(document)
