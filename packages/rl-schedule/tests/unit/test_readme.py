"""The code blocks of the README run."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(README), "exec"), {})
    assert re.match(r"\([\d, ]+\) 1\.\d+ 1\.\d+ [0-9a-f]{12}\n", capsys.readouterr().out)
