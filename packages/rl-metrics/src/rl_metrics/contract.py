"""The contract ``metric-record.v1``: named metric records as a JSON document.

Layer: standard library only, below everything else. A document has a header (``contract``, ``minor``, ``producer``) and ``records``.

Within the major version only keys with a stated default are added. Units, kinds and the meaning of a key never change. JSON has no NaN or
infinity, so a number that is not finite is written as ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.

The three verbs: :func:`validate_document` lists every problem, :func:`is_document` answers yes or no, and
:func:`rl_metrics.parse_document` builds records.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from importlib import metadata, resources
from typing import Any, Literal, TypedDict, get_args

from rl_metrics.errors import UnsupportedContractError

__all__ = [
    "CONTRACT_ID",
    "KINDS",
    "MINOR",
    "JsonNumber",
    "Kind",
    "MetricDocument",
    "MetricRecord",
    "Producer",
    "SketchRecord",
    "check_contract",
    "is_document",
    "load_schema",
    "producer",
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

JsonNumber = float | Literal["NaN", "Infinity", "-Infinity"]
"""A number, or the name of one that JSON cannot hold."""

_log = logging.getLogger(__name__)
_newer_minors_seen: set[int] = set()


class Producer(TypedDict):
    """Who wrote a document."""

    distribution: str
    """Name of the distribution, ``"rl-metrics"``."""

    version: str
    """Its version."""


class SketchRecord(TypedDict):
    """A quantile sketch: counts in buckets whose bounds grow geometrically (see :mod:`rl_metrics.sketch`)."""

    relative_error: float
    """Bound on the relative error of a quantile, between 0 and 1."""

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
    """One metric. The required keys are ``name``, ``kind``, ``numerator``, ``weight`` and ``unit`` (see :class:`rl_metrics.Metric`)."""

    m2: JsonNumber
    """Kind ``moments``: sum of squared deviations from the mean. Default 0."""

    stamp: float
    """Kind ``last``: when the value was taken; the greatest wins. Default 0."""

    sketch: SketchRecord
    """Kind ``histogram``: the buckets."""


class MetricDocument(TypedDict):
    """A document of the contract."""

    contract: Literal["metric-record.v1"]
    """The id, equal to :data:`CONTRACT_ID`."""

    minor: int
    """Minor version of the writer."""

    producer: Producer
    """Who wrote it."""

    records: list[MetricRecord]
    """The metrics; names are unique."""


def producer() -> Producer:
    """Return this distribution's name and version, from its installed metadata."""
    return {"distribution": "rl-metrics", "version": metadata.version("rl-metrics")}


def load_schema() -> dict[str, Any]:
    """Return the JSON Schema of the contract, which ships with the package."""
    text = resources.files("rl_metrics").joinpath("schemas", f"{CONTRACT_ID}.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def check_contract(document: Mapping[str, Any]) -> None:
    """Raise :class:`UnsupportedContractError` unless the document carries this contract's id; log a newer minor once."""
    found = document.get("contract")
    if found != CONTRACT_ID:
        raise UnsupportedContractError(
            f"the document's contract is {found!r}, this reader knows {CONTRACT_ID!r}: write it with an rl-metrics of the same major version, "
            "or install the rl-metrics that wrote it"
        )
    minor = document.get("minor")
    if isinstance(minor, int) and minor > MINOR and minor not in _newer_minors_seen:
        _newer_minors_seen.add(minor)
        _log.warning("%s: the document has minor version %d, this reader knows %d; unknown keys are ignored", CONTRACT_ID, minor, MINOR)


def validate_document(document: Mapping[str, Any]) -> list[str]:
    """Return every problem of a document as one sentence each, naming the record; empty when there is none.

    Raises:
        UnsupportedContractError: when the document is of another contract, in which case its keys mean something else.
    """
    check_contract(document)
    problems = [f"{key!r} must be {what}" for key, test, what in _HEADER if not test(document.get(key))]
    records = document.get("records")
    names: set[str] = set()
    for i, record in enumerate(records if isinstance(records, list) else []):
        if not isinstance(record, Mapping):
            problems.append(f"record {i} must be an object")
            continue
        where = f"record {i} ({record.get('name')!r})"
        problems += [f"{where}: {problem}" for problem in _record_problems(record)]
        if record.get("name") in names:
            problems.append(f"{where}: the name appears twice")
        names.add(str(record.get("name")))
    return problems


def is_document(document: Mapping[str, Any]) -> bool:
    """Say whether a mapping is a valid document of this contract."""
    return document.get("contract") == CONTRACT_ID and not validate_document(document)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_number(value: object) -> bool:
    return (
        value in ("NaN", "Infinity", "-Infinity")
        if isinstance(value, str)
        else isinstance(value, int | float) and not isinstance(value, bool)
    )


def _is_producer(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("distribution"), str) and isinstance(value.get("version"), str)


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
    return problems


def _sketch_problems(sketch: object) -> list[str]:
    """Return what is wrong with a sketch."""
    if not isinstance(sketch, Mapping):
        return ["kind 'histogram' needs an object 'sketch'"]
    error = sketch.get("relative_error")
    problems = [] if _is_weight(error) and 0 < float(error or 0) < 1 else ["sketch: 'relative_error' must lie between 0 and 1"]
    if not (_is_weight(sketch.get("zero")) and _is_weight(sketch.get("nonfinite"))):
        problems.append("sketch: 'zero' and 'nonfinite' must be weights")
    for sign in ("positive", "negative"):
        indices, counts = sketch.get(f"{sign}_indices"), sketch.get(f"{sign}_counts")
        if not (isinstance(indices, list) and isinstance(counts, list) and len(indices) == len(counts)):
            problems.append(f"sketch: '{sign}_indices' and '{sign}_counts' must be lists of equal length")
        elif not all(isinstance(i, int) for i in indices) or indices != sorted(set(indices)) or not all(_is_weight(c) for c in counts):
            problems.append(f"sketch: '{sign}_indices' must ascend and '{sign}_counts' must be weights")
    return problems
