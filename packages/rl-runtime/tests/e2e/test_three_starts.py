"""The whole quick start on three random starts that nobody tuned for: each one learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rl_runtime.tracking.tracker import read_metrics

if TYPE_CHECKING:
    from e2e.conftest import Launcher

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("rng", [101, 202, 303])
def test_the_quick_start_learns_from_this_start(launch: Launcher, rng: int) -> None:
    """Reward rises by at least 0.2 and exact match by 0.25 on held-out prompts, in 8 minutes."""
    run = launch(f"start_{rng}", f"run.rng={rng}")
    assert run.wait(480) == 0, run.text()[-4000:]
    evaluations = [line for line in read_metrics(run.folder) if "eval/exact_match" in line]
    first, last = evaluations[0], evaluations[-1]
    assert last["eval/reward_mean"] - first["eval/reward_mean"] >= 0.2
    assert last["eval/exact_match"] - first["eval/exact_match"] >= 0.25
    run.wait_until_nothing_is_left(10)
