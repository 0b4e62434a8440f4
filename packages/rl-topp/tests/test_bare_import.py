"""`import rl_topp` stays light: checked in a fresh interpreter, since this one has it all."""

import subprocess
import sys

HEAVY = (
    "torch",
    "triton",
    "sglang",
    "megatron",
    "ray",
    "transformers",
    "pyarrow",
    "typer",
    "rich",
    "rl_schedule",
    "rl_metrics",
    "rl_dump",
    "rl_runtime",
)


def test_import_loads_no_heavy_library() -> None:
    code = f"""
import sys
import rl_topp, rl_topp.sglang.plugin, rl_topp.reference, rl_topp.stats, rl_topp.wire
heavy = {HEAVY!r}
found = sorted(name for name in sys.modules if name.split(".")[0] in heavy)
sys.exit(f"loaded: {{found}}" if found else 0)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
