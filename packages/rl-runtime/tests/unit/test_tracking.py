"""Metrics leave through one place, complete and finite; the report opens offline."""

import json
import logging
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from rl_runtime.tracking.console import Display
from rl_runtime.tracking.report import write_report
from rl_runtime.tracking.tracker import Tracker, read_metrics


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text("[run]\n# <script>alert(1)</script>\n")
    (tmp_path / "dumps").mkdir()
    for number in (10, 9):
        (tmp_path / "dumps" / f"train_{number}.parquet").write_bytes(b"x")
    with Tracker(tmp_path, tensorboard=True) as tracker:
        tracker.log(batch=0, step=0, metrics={"eval/exact_match": 0.1, "eval/reward_mean": 0.5})
        for batch in range(3):
            tracker.log(
                batch=batch,
                step=batch,
                metrics={"train/loss": 0.1 * batch, "rollout/reward_mean": 0.5 + 0.1 * batch},
            )
        tracker.log(batch=3, step=3, metrics={"eval/exact_match": 0.6, "eval/reward_mean": 0.9})
    return tmp_path


def test_a_line_per_step_in_order(run_dir: Path) -> None:
    lines = read_metrics(run_dir)
    assert [line["batch"] for line in lines] == [0, 0, 1, 2, 3]
    assert lines[1] == {"batch": 0, "step": 0, "train/loss": 0.0, "rollout/reward_mean": 0.5}


def test_no_data_is_left_out_and_not_finite_is_null_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Tracker(tmp_path, tensorboard=False) as tracker:
        tracker.log(batch=0, step=0, metrics={"train/kl": None, "train/loss": math.nan})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "batch": 0,
        "step": 0,
        "train/loss": None,
    }
    assert "train/loss" in caplog.text


def test_a_line_that_a_crash_cut_short_is_left_out(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"batch": 9, "tra')
    assert len(read_metrics(run_dir)) == 5


def test_tensorboard_reads_the_scalars(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("rollout/reward_mean")] == [0, 1, 2]
    assert events.Scalars("rollout/reward_mean")[2].value == pytest.approx(0.7)


def test_the_report_needs_no_network_and_escapes_what_it_shows(run_dir: Path) -> None:
    page = write_report(run_dir).read_text()
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    assert "<script>" not in page
    assert "0.10 → 0.60" in page
    assert "+0.50" in page
    assert page.index("train_9.parquet") < page.index("train_10.parquet")


def test_a_run_that_ended_before_its_first_step_still_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "0 batches" in write_report(tmp_path).read_text()


def test_the_terminal_curve_shows_reward_and_held_out_points(run_dir: Path) -> None:
    console = Console(record=True, width=90, force_terminal=False)
    Display(console).curve(read_metrics(run_dir))
    text = console.export_text()
    assert "exact match" in text
    assert "reward" in text
