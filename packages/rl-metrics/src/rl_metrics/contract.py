"""The contract `metric-record.v1`: named metric records as a JSON document.

A document has a header (`contract`, `minor`, `producer`) and `records`.

Within the major version only keys with a stated default are added. Units, kinds and the meaning of
a key never change. JSON has no NaN or infinity, so a number that is not finite is written as
`"NaN"`, `"Infinity"` or `"-Infinity"`.

The three verbs: `validate_document` lists every problem, `is_document` answers yes or no, and
`rl_metrics.parse_document` builds records.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from importlib import metadata, resources
from typing import Any, Literal, TypedDict, get_args

from rl_metrics.errors import UnsupportedContractError

__all__ = [
    "CONTRACT_ID",
    "KINDS",
    "MINOR",
    "SMALLEST_RELATIVE_ERROR",
    "JsonNumber",
    "Kind",
    "MetricDocument",
    "MetricRecord",
    "Producer",
    "SketchRecord",
    "check_contract",
    "empty_numerator",
    "is_document",
    "largest_bucket",
    "load_schema",
    "numbers_problem",
    "producer",
    "sketch_problem",
    "validate_document",
]

CONTRACT_ID: Literal["metric-record.v1"] = "metric-record.v1"
"""The id of the contract, with its major version."""

MINOR = 0
"""The minor version this package writes."""

Kind = Literal["sum", "mean", "min", "max", "moments", "last", "histogram"]
"""How records of one metric merge. Declared by the value, never read from the name."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""All kinds."""

SMALLEST_RELATIVE_ERROR = 1e-12
"""Bounds below it are finer than float64 can tell buckets apart."""

JsonNumber = float | Literal["NaN", "Infinity", "-Infinity"]
"""A number, or the name of one that JSON cannot hold."""

_log = logging.getLogger(__name__)
_newer_minors_seen: set[int] = set()


class Producer(TypedDict):
    """Who wrote a document."""

    distribution: str
    """Name of the distribution, `"rl-metrics"`."""

    version: str
    """Its version."""


class SketchRecord(TypedDict):
    """A quantile sketch: counts in buckets whose bounds grow geometrically (see `rl_metrics.sketch`)."""

    relative_error: float
    """Bound on the relative error of a quantile, at least 1e-12 and below 1."""

    zero: float
    """Weight of values that are zero."""

    nonfinite: float
    """Weight of values that are NaN or infinite."""

    positive_indices: list[int]
    """Bucket indices of positive values, ascending."""

    positive_counts: list[float]
    """Weight in each of those buckets."""

    negative_indices: list[int]
    """Bucket indices of the magnitudes of negative values, ascending."""

    negative_counts: list[float]
    """Weight in each of those buckets."""


class _MetricRecordBase(TypedDict):
    name: str
    kind: Kind
    numerator: JsonNumber
    weight: float
    unit: str


class MetricRecord(_MetricRecordBase, total=False):
    """One metric.

    The required keys are `name`, `kind`, `numerator`, `weight` and `unit` (see
    `rl_metrics.Metric`).
    """

    m2: JsonNumber
    """Kind `moments`: sum of squared deviations from the mean. Default 0."""

    stamp: float
    """Kind `last`: when the value was taken; the greatest wins. Default 0."""

    sketch: SketchRecord
    """Kind `histogram`: the buckets."""


class MetricDocument(TypedDict):
    """A document of the contract."""

    contract: Literal["metric-record.v1"]
    """The id, equal to `CONTRACT_ID`."""

    minor: int
    """Minor version of the writer."""

    producer: Producer
    """Who wrote it."""

    records: list[MetricRecord]
    """The metrics; names are unique."""


def producer() -> Producer:
    """Return this distribution's name and version, from its installed metadata: `{"distribution": "rl-metrics", "version": "0.1.0"}`."""
    return {"distribution": "rl-metrics", "version": metadata.version("rl-metrics")}


def load_schema() -> dict[str, Any]:
    """Return the JSON Schema of the contract, which ships with the package."""
    text = (
        resources.files("rl_metrics")
        .joinpath("schemas", f"{CONTRACT_ID}.json")
        .read_text(encoding="utf-8")
    )
    schema: dict[str, Any] = json.loads(text)
    return schema


def empty_numerator(kind: str) -> float:
    """Return the numerator of a record without data: +inf for `min`, -inf for `max`, else 0."""
    return {"min": math.inf, "max": -math.inf}.get(str(kind), 0.0)


def numbers_problem(kind: str, *, numerator: float, weight: float, m2: float, stamp: float) -> str:
    """Return what contradicts in the numbers of one record, in one sentence; empty when nothing
    does.

    Args:
        kind: one of `KINDS`.
        numerator: see `rl_metrics.Metric`, like the rest.
        weight: finite and not negative; 0 says that there is no data.
        m2: a sum of squares, of `moments` only.
        stamp: a finite number, of `last` only.
    """
    if not 0 <= weight < math.inf:
        return f"weight is {weight}; give a finite number that is not negative, 0 for no data"
    if not weight and numerator != empty_numerator(kind):
        return (
            f"numerator is {numerator} under weight 0, which says that there is no data; give its"
            " weight, or Metric.empty where there is none"
        )
    if m2 < 0 or (m2 != 0 and (kind != "moments" or not weight)):
        return (
            f"m2 is {m2}; a sum of squares is not negative, and 0 without data and for all kinds"
            " but 'moments'"
        )
    if not math.isfinite(stamp) or (stamp != 0 and kind != "last"):
        return (
            f"stamp is {stamp}; give the finite number of the step the value belongs to, and 0 for"
            " all kinds but 'last'"
        )
    return ""


def largest_bucket(relative_error: float) -> int:
    """Return the greatest magnitude of a bucket index that a float64 can fall into: 35,488 for a relative error of 0.01."""
    return math.ceil(
        math.log(sys.float_info.max) / (math.log1p(relative_error) - math.log1p(-relative_error))
    )


def sketch_problem(sketch_weight: float, weight: float) -> str:
    """Return what contradicts between a histogram's weight and that of its buckets, in one
    sentence; empty when nothing does.

    Args:
        sketch_weight: total weight in the sketch.
        weight: weight of the record; shares of a value held by several ranks may make it differ by
            rounding.
    """
    if math.isclose(sketch_weight, weight, rel_tol=1e-9):
        return ""
    return (
        f"weight is {weight} but the sketch holds {sketch_weight}; give the sketch of the values"
        " that were weighed"
    )


def check_contract(document: Mapping[str, Any]) -> None:
    """Check the contract of a document and log a newer minor version, once.

    Args:
        document: as `json.loads` gives it.

    Raises:
        UnsupportedContractError: unless it is a mapping that carries this contract's id; it names
            both ids.
    """
    if not isinstance(document, Mapping):
        raise UnsupportedContractError(
            f"the document is {type(document).__name__}, a document of {CONTRACT_ID!r} is a JSON"
            " object: give the mapping that json.loads makes of it"
        )
    found = document.get("contract")
    if found != CONTRACT_ID:
        raise UnsupportedContractError(
            f"the document's contract is {found!r}, this reader knows {CONTRACT_ID!r}: write it"
            " with an rl-metrics of the same major version, or install the rl-metrics that"
            " wrote it"
        )
    minor = document.get("minor")
    if isinstance(minor, int) and minor > MINOR and minor not in _newer_minors_seen:
        _newer_minors_seen.add(minor)
        _log.warning(
            "%s: the document has minor version %d, this reader knows %d; unknown keys are ignored",
            CONTRACT_ID,
            minor,
            MINOR,
        )


def validate_document(document: Mapping[str, Any]) -> list[str]:
    """Return every problem of a document as one sentence each, naming the record; empty when there
    is none.

    Args:
        document: as `json.loads` gives it.

    Raises:
        UnsupportedContractError: when the document is no mapping or of another contract, in which
            case its keys mean something else.
    """
    check_contract(document)
    problems = [
        f"{key!r} must be {what}" for key, test, what in _HEADER if not test(document.get(key))
    ]
    records = document.get("records")
    names: set[str] = set()
    for i, record in enumerate(records if isinstance(records, list) else []):
        if not isinstance(record, Mapping):
            problems.append(f"record {i} must be an object")
            continue
        name = record.get("name")
        where = f"record {i} ({name!r})"
        problems += [f"{where}: {problem}" for problem in _record_problems(record)]
        if isinstance(name, str):
            if name in names:
                problems.append(f"{where}: the name appears twice")
            names.add(name)
    return problems


def is_document(document: object) -> bool:
    """Say whether something is a valid document of this contract; anything but a mapping is none."""
    return (
        isinstance(document, Mapping)
        and document.get("contract") == CONTRACT_ID
        and not validate_document(document)
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_weight(value: object) -> bool:
    return not isinstance(value, str) and _is_number(value) and 0 <= float(value) < math.inf  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    """Say whether a value stands for a float64; JSON integers have no bound, float64 has."""
    if isinstance(value, str):
        return value in ("NaN", "Infinity", "-Infinity")
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1023
    return isinstance(value, float)


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_producer(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("distribution"), str)
        and isinstance(value.get("version"), str)
    )


_HEADER = (
    ("minor", _is_count, "a non-negative integer"),
    ("producer", _is_producer, "an object with the strings 'distribution' and 'version'"),
    ("records", lambda value: isinstance(value, list), "a list"),
)


def _record_problems(record: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with one record."""
    problems = []
    if not (isinstance(record.get("name"), str) and record["name"]):
        problems.append("'name' must be a non-empty string")
    if record.get("kind") not in KINDS:
        problems.append(f"'kind' is {record.get('kind')!r}; it must be one of {', '.join(KINDS)}")
    if not isinstance(record.get("unit"), str):
        problems.append("'unit' must be a string")
    if not _is_number(record.get("numerator")):
        problems.append("'numerator' must be a number")
    if not _is_weight(record.get("weight")):
        problems.append("'weight' must be a finite number that is not negative")
    if not _is_number(record.get("m2", 0.0)) or not _is_number(record.get("stamp", 0.0)):
        problems.append("'m2' and 'stamp' must be numbers")
    if record.get("kind") == "histogram":
        problems += _sketch_problems(record.get("sketch"))
    if not problems:
        numbers = {
            key: float(record.get(key, 0.0)) for key in ("numerator", "weight", "m2", "stamp")
        }
        contradiction = numbers_problem(record["kind"], **numbers)
        if record["kind"] == "histogram" and not contradiction:
            contradiction = sketch_problem(_sketch_weight(record["sketch"]), numbers["weight"])
        problems += [contradiction] if contradiction else []
    return problems


def _sketch_problems(sketch: object) -> list[str]:
    """Return what is wrong with a sketch."""
    if not isinstance(sketch, Mapping):
        return ["kind 'histogram' needs an object 'sketch'"]
    error = sketch.get("relative_error")
    if not (_is_weight(error) and SMALLEST_RELATIVE_ERROR <= float(error or 0) < 1):
        return [f"sketch: 'relative_error' must lie between {SMALLEST_RELATIVE_ERROR} and 1"]
    problems = []
    limit = largest_bucket(float(error or 0))
    if not (_is_weight(sketch.get("zero")) and _is_weight(sketch.get("nonfinite"))):
        problems.append("sketch: 'zero' and 'nonfinite' must be weights")
    for sign in ("positive", "negative"):
        indices, counts = sketch.get(f"{sign}_indices"), sketch.get(f"{sign}_counts")
        if not (
            isinstance(indices, list) and isinstance(counts, list) and len(indices) == len(counts)
        ):
            problems.append(
                f"sketch: '{sign}_indices' and '{sign}_counts' must be lists of equal length"
            )
        elif (
            not all(_is_index(i) for i in indices)
            or indices != sorted(set(indices))
            or not all(_is_weight(c) for c in counts)
        ):
            problems.append(
                f"sketch: '{sign}_indices' must ascend and '{sign}_counts' must be weights"
            )
        elif indices and not -limit <= indices[0] <= indices[-1] <= limit:
            problems.append(
                f"sketch: '{sign}_indices' must lie in -{limit}..{limit}, the buckets of float64 at"
                " this relative error"
            )
    return problems


def _sketch_weight(sketch: Mapping[str, Any]) -> float:
    """Return the total weight in a sketch whose fields are well-formed."""
    return sum(
        float(x)
        for x in (
            sketch["zero"],
            sketch["nonfinite"],
            *sketch["positive_counts"],
            *sketch["negative_counts"],
        )
    )
