"""`import rl_runtime`, its configuration and its command line load no engine, in a fresh interpreter."""

import subprocess
import sys

HEAVY = ("torch", "ray", "sglang", "megatron", "transformers")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, rl_runtime, rl_runtime.cli.app, rl_runtime.config, rl_runtime.setup.doctor; print([name"
        f" for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
