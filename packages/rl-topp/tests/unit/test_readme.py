"""The README's Python blocks run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_blocks_run() -> None:
    pytest.importorskip("torch")
    if not README.exists():
        pytest.skip("the README lies beside the tests in the repository only")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
