"""The README's Python blocks run as they stand."""

import ast
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) == 9


def test_what_a_trainer_writes_to_adopt_it_takes_fewer_than_15_lines() -> None:
    functions = [
        node
        for block in BLOCKS
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.FunctionDef)
    ]
    names = [function.name for function in functions]
    assert names == ["train_step", "token_loss", "agg_loss", "loss_function", "loss_function"]
    for function in functions:
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno + 1 < 15, function.name


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs(block: str) -> None:
    if "import torch" in block:
        pytest.importorskip("torch")
    exec(compile(block, str(README), "exec"), {})
