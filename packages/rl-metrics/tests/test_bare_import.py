"""`import rl_metrics` stays light: a fresh interpreter loads no heavy library."""

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
    code = f"import sys, rl_metrics; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_without_torch_the_tensor_code_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import rl_metrics.torch"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert (
        'rl_metrics.torch needs torch: pip install "rl-metrics[torch]"'
        in done.stderr.splitlines()[-1]
    )
