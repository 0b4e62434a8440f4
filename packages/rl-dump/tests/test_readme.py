"""The README's Python blocks run as they stand, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_dump.cli.app import app

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs(block: str) -> None:
    if "import torch" in block:
        pytest.importorskip("torch")
    exec(compile(block, str(README), "exec"), {})


def test_every_command_is_in_the_readme() -> None:
    names = {
        command.name or getattr(command.callback, "__name__", None)
        for command in app.registered_commands
    }
    shown = set(re.findall(r"^rl-dump (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert shown == names
