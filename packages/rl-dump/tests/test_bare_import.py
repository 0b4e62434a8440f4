"""`import rl_dump` needs numpy and pyarrow, and loads nothing else that is heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from stubs.dump_batches import Pair

HEAVY = (
    "torch",
    "ray",
    "sglang",
    "megatron",
    "transformers",
    "typer",
    "rich",
    "pandas",
    "rl_schedule",
    "rl_metrics",
    "rl_topp",
    "rl_runtime",
)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        f"import sys, rl_dump, rl_dump.contract; print([name for name in {HEAVY!r} if name in"
        " sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_reading_a_torch_archive_loads_no_torch(tmp_path: Path, pair: Pair) -> None:
    from rl_dump import convert

    code = (
        "import sys, rl_dump; d = rl_dump.open_dump(sys.argv[1]); d.column('log_probs');"
        " d.sample(0); d.verify(); print('torch' in sys.modules)"
    )
    import pytest

    pytest.importorskip("torch")
    archive = convert(pair[1], tmp_path / "train.pt")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, archive],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False"
