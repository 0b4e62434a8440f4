"""Metrics as documents of `metric-record.v1`, and back.

Invariant, tested: `parse_document(to_document(m))` gives the same records, through JSON text and
for numbers that are not finite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rl_metrics.contract import (
    CONTRACT_ID,
    MINOR,
    JsonNumber,
    MetricDocument,
    MetricRecord,
    SketchRecord,
    producer,
    validate_document,
)
from rl_metrics.errors import MetricsError
from rl_metrics.metric import Metric
from rl_metrics.reporting import listed_metrics
from rl_metrics.sketch import QuantileSketch

__all__ = ["parse_document", "to_document"]


def to_document(metrics: Iterable[Metric] | Mapping[str, Metric]) -> MetricDocument:
    """Return metrics as a document that `json.dumps` takes as it is.

    Args:
        metrics: records of different names, or a mapping from names to records, such as
            `rl_metrics.merge_metrics` gives.

    Returns:
        The document of `metric-record.v1`; numbers that are not finite are written by name.

    Raises:
        MetricsError: when one is no metric, or two share a name.
    """
    records = [_to_record(metric) for metric in listed_metrics(metrics, "metrics")]
    twice = sorted(
        name for name, times in Counter(record["name"] for record in records).items() if times > 1
    )
    if twice:
        raise MetricsError(
            f"names appear more than once: {twice}; merge the records of one name first"
            " (merge_metrics)"
        )
    return {"contract": CONTRACT_ID, "minor": MINOR, "producer": producer(), "records": records}


def parse_document(document: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics of a document.

    Args:
        document: as `json.loads` gives it. Unknown keys are ignored; a newer minor is logged once.

    Returns:
        The records in the document's order.

    Raises:
        UnsupportedContractError: for another contract id, or something that is no mapping.
        MetricsError: listing ALL problems of the document.
    """
    problems = validate_document(document)
    if problems:
        raise MetricsError(f"the document is not a valid {CONTRACT_ID}: " + "; ".join(problems))
    return [_from_record(record) for record in document["records"]]


def _to_record(metric: Metric) -> MetricRecord:
    """Return one record; keys with a default are written only where the kind uses them."""
    record: MetricRecord = {
        "name": metric.name,
        "kind": metric.kind,
        "numerator": _encode(metric.numerator),
        "weight": metric.weight,
        "unit": metric.unit,
    }
    if metric.kind == "moments":
        record["m2"] = _encode(metric.m2)
    if metric.kind == "last":
        record["stamp"] = metric.stamp
    if metric.sketch is not None:
        record["sketch"] = _encode_sketch(metric.sketch)
    return record


def _from_record(record: Mapping[str, Any]) -> Metric:
    """Undo `_to_record`."""
    sketch = record.get("sketch") if record["kind"] == "histogram" else None
    return Metric(
        name=record["name"],
        kind=record["kind"],
        numerator=float(record["numerator"]),
        weight=float(record["weight"]),
        unit=record["unit"],
        m2=float(record.get("m2", 0.0)),
        stamp=float(record.get("stamp", 0.0)),
        sketch=None if sketch is None else _decode_sketch(sketch),
    )


def _encode(number: float) -> JsonNumber:
    """Return a number as JSON can hold it; `float()` reads all of them back."""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _encode_sketch(sketch: QuantileSketch) -> SketchRecord:
    """Return a sketch as lists."""
    return {
        "relative_error": sketch.relative_error,
        "zero": sketch.zero,
        "nonfinite": sketch.nonfinite,
        "positive_indices": sketch.positive_indices.tolist(),
        "positive_counts": sketch.positive_counts.tolist(),
        "negative_indices": sketch.negative_indices.tolist(),
        "negative_counts": sketch.negative_counts.tolist(),
    }


def _decode_sketch(sketch: Mapping[str, Any]) -> QuantileSketch:
    """Undo `_encode_sketch`."""
    return QuantileSketch(
        relative_error=float(sketch["relative_error"]),
        zero=float(sketch["zero"]),
        nonfinite=float(sketch["nonfinite"]),
        positive_indices=np.array(sketch["positive_indices"], np.int64),
        positive_counts=np.array(sketch["positive_counts"], np.float64),
        negative_indices=np.array(sketch["negative_indices"], np.int64),
        negative_counts=np.array(sketch["negative_counts"], np.float64),
    )
