"""``import rl_metrics`` stays light: no heavy library, no command line library, in a fresh interpreter."""

import subprocess
import sys

HEAVY = (
    "torch",
    "ray",
    "sglang",
    "megatron",
    "transformers",
    "pyarrow",
    "typer",
    "rich",
    "rl_schedule",
    "rl_dump",
    "rl_topp",
    "rl_runtime",
)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, rl_metrics, rl_metrics.contract; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
