"""Hypothesis settings, the fuzz marker and a file of lengths, also outside the workspace."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

# No deadline: a shared machine stalls for longer than any honest one.
settings.register_profile("rl-schedule", deadline=None, max_examples=100)
settings.register_profile("small", deadline=None, max_examples=20)
settings.load_profile("rl-schedule")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of this package."""
    config.addinivalue_line("markers", "fuzz: large counts of random cases, off by default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave fuzz tests out unless `-m` speaks of them."""
    if "fuzz" not in str(config.getoption("markexpr")):
        for item in items:
            if item.get_closest_marker("fuzz"):
                item.add_marker(pytest.mark.skip(reason="large; select with -m fuzz"))


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """A file of 60 samples, two to a rollout, for the command line."""
    path = tmp_path / "lengths.jsonl"
    values = (
        np.clip(np.rint(np.random.default_rng(0).lognormal(5, 1, 60)), 4, 2000).astype(int).tolist()
    )
    path.write_text(
        "".join(
            json.dumps({"total_length": v, "rollout_id": i // 2}) + "\n"
            for i, v in enumerate(values)
        )
    )
    return path
