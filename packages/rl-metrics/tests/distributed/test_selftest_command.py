"""The self-test as a user runs it: exit 0 with a table, 1 for a difference, 2 for no way to run."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from rl_metrics import cli, megatron_loss_scale
from rl_metrics.cli import app
from rl_metrics.selftest import layout_checks

pytestmark = pytest.mark.distributed


def test_the_module_prints_a_table_of_layouts_and_values() -> None:
    command = [sys.executable, "-m", "rl_metrics.selftest", "--processes", "2"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "80"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rl-metrics self-test" in done.stdout
    assert "all 60 checks agree" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("ok ")]
    assert len(rows) == 60, "a row is one line of 80 columns"
    assert all(len(row) == 10 for row in rows), "nothing is cut or folded"
    assert {row[4] for row in rows} == {
        "token_mean",
        "sample_mean",
        "rollout_mean",
        "prompt_mean",
        "constant",
    }
    assert done.stderr.splitlines() == [
        "loading torch",
        "mesh 1 of 3: dp 1 x cp 1, both layouts, gloo ranks: 1",
        "mesh 2 of 3: dp 1 x cp 2, both layouts, gloo ranks: 2",
        "mesh 3 of 3: dp 2 x cp 1, both layouts, gloo ranks: 2",
    ]


def test_json_gives_seed_verdict_and_every_check() -> None:
    result = CliRunner().invoke(app, ["selftest", "--processes", "1", "--seed", "3", "--json"])
    document = json.loads(result.stdout)
    checks = document.pop("checks")
    assert document == {"seed": 3, "verdict": "agree"}
    assert result.exit_code == 0
    assert len(checks) == 20
    assert all(check["passes"] and check["worst"] <= 1e-6 for check in checks)


def test_a_difference_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        layout_checks,
        "megatron_loss_scale",
        lambda aggregation, **sizes: 2 * megatron_loss_scale(aggregation, **sizes),
    )
    result = CliRunner().invoke(app, ["selftest", "--processes", "1"])
    assert result.exit_code == 1
    assert "20 of 20 checks differ" in result.stdout
    assert result.stdout.count("FAIL") == 20
    assert "dp 1 cp 1 zigzag float32 token_mean: loss" in result.stdout
    assert "of gradient 1.0e+00; absolute difference of whitened values" in result.stdout
    assert "responses restored exactly" in result.stdout


def test_ranks_that_fail_exit_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> NoReturn:
        raise ArithmeticError("no")

    monkeypatch.setattr(layout_checks, "make_scenario", lambda seed: None)
    monkeypatch.setattr(layout_checks, "_check_mesh", broken)
    result = CliRunner().invoke(app, ["selftest", "--processes", "1"])
    assert result.exit_code == 2
    assert "the self-test could not run: rank 0 of 1: Traceback" in result.stderr
    assert "ArithmeticError: no" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--seed", "-1"), ("--seed", "x"), ("--processes", "0"), ("--deadline-seconds", "0")],
)
def test_an_argument_out_of_range_is_a_usage_error(arguments: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["selftest", *arguments])
    assert result.exit_code == 2
    assert "Invalid value for" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rl_metrics.selftest.layout_checks", None)
    monkeypatch.setattr(sys, "argv", ["rl-metrics", "selftest"])
    result = CliRunner().invoke(app, ["selftest", "--processes", "1"])
    assert result.exit_code == 2
    assert "pip install 'rl-metrics[torch]'" in result.stderr


@pytest.mark.parametrize(
    ("run", "arguments"),
    [
        (lambda: runpy.run_module("rl_metrics.selftest", run_name="__main__"), []),
        (cli.main, ["selftest"]),
    ],
)
def test_both_entry_points_run_it(
    run: Callable[[], object], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *arguments, "--processes", "1", "--json"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
