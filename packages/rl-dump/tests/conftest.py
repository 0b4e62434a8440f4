"""Make the helpers in `stubs/` importable and keep hypothesis modest."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from stubs import dump_browser
from stubs.dump_batches import Columns, Pair, batch, write_pair

settings.register_profile(
    "rl-dump",
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("small", parent=settings.get_profile("rl-dump"), max_examples=15)
settings.load_profile("rl-dump")


_HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore = [] if _HAS_TORCH else ["distributed"]
collect_ignore_glob = [] if _HAS_TORCH else ["*/test_torch_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, so that the tests also run outside the workspace."""
    config.addinivalue_line("markers", "distributed: starts gloo processes")
    config.addinivalue_line("markers", "fuzz: large counts of random cases")


@pytest.fixture
def columns() -> Columns:
    return batch()


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """The rollout dump and the train dump of one batch."""
    return write_pair(tmp_path)


@pytest.fixture
def needs_browser() -> None:
    dump_browser.require()
