"""Importing the package, its configuration or its command line loads no engine."""

import subprocess
import sys

HEAVY = ("torch", "ray", "sglang", "megatron", "transformers")


def test_importing_the_package_loads_nothing_heavy() -> None:
    modules = "rl_runtime, rl_runtime.cli.app, rl_runtime.config, rl_runtime.setup.doctor"
    code = f"import sys, {modules}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
