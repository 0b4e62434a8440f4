"""Shared fixtures: the handed cases, and ranks over real gloo."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture(scope="session")
def handed_cases() -> dict[str, dict]:
    """The cases of ``tests/golden/metrics.json`` by name."""
    document = json.loads((Path(__file__).parent / "golden" / "metrics.json").read_text())
    return {case["name"]: case for case in document["cases"]}
