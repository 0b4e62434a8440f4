"""Importing the package costs numpy and nothing heavy."""

import subprocess
import sys

HEAVY = ["torch", "ray", "sglang", "megatron", "transformers", "pyarrow", "typer", "rich", "pandas"]


def test_bare_import_loads_nothing_heavy() -> None:
    code = f"import sys, rl_schedule; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"
