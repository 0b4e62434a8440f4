"""The self-test as a user runs it: a table, exit 0; a difference, exit 1; no way to run it, exit 2."""

import json
import subprocess
import sys
from typing import Never

import pytest
from typer.testing import CliRunner

from rl_metrics.cli import app
from rl_metrics.torch import selftest

pytestmark = pytest.mark.distributed


def test_the_module_prints_a_table_of_layouts_and_values() -> None:
    command = [sys.executable, "-m", "rl_metrics.selftest", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=None, check=False)
    assert done.returncode == 0, done.stderr
    assert "rl-metrics self-test" in done.stdout
    assert "all 60 checks agree" in " ".join(done.stdout.split())


def test_json_lists_every_check() -> None:
    result = CliRunner().invoke(app, ["selftest", "--processes", "1", "--json"])
    checks = json.loads(result.stdout)
    assert result.exit_code == 0
    assert len(checks) == 20
    assert all(check["passes"] and check["worst"] <= 1e-6 for check in checks)


def test_a_difference_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = selftest.megatron_loss_scale
    monkeypatch.setattr(selftest, "megatron_loss_scale", lambda aggregation, **sizes: 2 * right(aggregation, **sizes))
    result = CliRunner().invoke(app, ["selftest", "--processes", "1"])
    assert result.exit_code == 1
    assert "20 of 20 checks differ" in " ".join(result.stdout.split())


def test_ranks_that_fail_exit_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_, **__) -> Never:
        raise ArithmeticError("no")

    monkeypatch.setattr(selftest, "make_scenario", lambda seed: None)
    monkeypatch.setattr(selftest, "_check_pairs", broken)
    result = CliRunner().invoke(app, ["selftest", "--processes", "1"])
    assert result.exit_code == 2
    assert "ArithmeticError: no" in result.stderr
