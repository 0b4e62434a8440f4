"""The frozen example documents of `metric-record.v1`: the current code reads them to the numbers they were written from."""

import json
import math
from pathlib import Path

import pytest

from rl_metrics import parse_document, to_document
from rl_metrics.contract import load_schema, validate_document

jsonschema = pytest.importorskip("jsonschema")

FILES = sorted((Path(__file__).parent / "metric-record.v1").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_are_valid_by_schema_and_by_code(path: Path) -> None:
    document = json.loads(path.read_text())
    jsonschema.validate(document, load_schema())
    assert validate_document(document) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_are_written_back_as_they_are(path: Path) -> None:
    document = json.loads(path.read_text())
    assert to_document(parse_document(document))["records"] == document["records"]


def test_every_kind_reads_to_its_value() -> None:
    (path,) = (path for path in FILES if path.stem == "every_kind")
    values = {metric.name: metric.value for metric in parse_document(json.loads(path.read_text()))}
    grad_norm = values.pop("train/grad_norm")
    assert grad_norm is not None
    assert math.isnan(grad_norm)
    assert values == {
        "train/loss": 0.32,
        "rollout/samples": 24.0,
        "train/ratio_min": 0.5,
        "train/ratio_max": math.inf,
        "rollout/reward": 3.0,
        "train/lr": 1e-5,
        "rollout/response_tokens": pytest.approx(1.0, rel=0.0101),
        "train/kl": None,
    }
