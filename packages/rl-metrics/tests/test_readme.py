"""The README's Python blocks run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) == 5


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs(block: str) -> None:
    if "import torch" in block:
        pytest.importorskip("torch")
    exec(compile(block, str(README), "exec"), {})
