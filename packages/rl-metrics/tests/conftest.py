"""Shared fixtures: the handed cases.

Tests of tensor code are left out where torch is not installed.
"""

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings

from rl_metrics import Aggregation

settings.register_profile(
    "default", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("small", parent=settings.get_profile("default"), max_examples=20)
settings.load_profile("default")

_HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore = [] if _HAS_TORCH else ["distributed"]
collect_ignore_glob = [] if _HAS_TORCH else ["*/test_torch_*.py"]

_CASES: dict[str, dict[str, Any]] = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "golden" / "metrics.json").read_text())["cases"]
}


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, so that the tests also run outside the workspace."""
    config.addinivalue_line("markers", "distributed: starts gloo processes")
    config.addinivalue_line("markers", "fuzz: large counts of random cases")
    config.addinivalue_line("markers", "gpu: needs an accelerator")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedStep:
    """One handed case of an aggregation: its samples and its answer."""

    aggregation: Aggregation
    values: list[npt.NDArray[np.float64]]
    masks: list[npt.NDArray[np.int32]]
    ids: dict[str, Any]
    expect: float | None
    loss: float | None


@pytest.fixture(scope="session")
def handed_cases() -> dict[str, dict[str, Any]]:
    """The cases of `tests/golden/metrics.json` by name."""
    return _CASES


@pytest.fixture(params=[name for name, case in _CASES.items() if "aggregation" in case])
def handed_step(request: pytest.FixtureRequest) -> HandedStep:
    """Each handed case of an aggregation in turn."""
    case = _CASES[request.param]
    values: list[npt.NDArray[np.float64]] = []
    masks: list[npt.NDArray[np.int32]] = []
    ids: dict[str, Any] = {}
    for sample in case["samples"]:
        given = sample["values"] if "values" in sample else [sample["value"]] * sample["tokens"]
        values.append(
            np.array([math.nan if value == "nan" else value for value in given], np.float64)
        )
        masks.append(np.array(sample.get("mask", [1] * len(given)), np.int32))
        for key in {"rollout_id", "group_id"} & set(sample):
            ids.setdefault(f"{key}s", []).append(sample[key])
    if "constant" in case:
        ids["constant"] = case["constant"]
    return HandedStep(
        aggregation=case["aggregation"],
        values=values,
        masks=masks,
        ids=ids,
        expect=case["expect"],
        loss=case.get("loss"),
    )
