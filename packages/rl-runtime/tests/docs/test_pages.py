"""The code blocks of the documentation run; its tables and drawn numbers are those of the code."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from rl_runtime.batch.columns import COLUMN_TYPES, batch_columns
from rl_runtime.records import Sample
from rl_topp import NucleusSet

DOCS = Path(__file__).parents[4] / "docs"
BLOCKS = [
    pytest.param(block, path, id=f"{path.relative_to(DOCS).as_posix()}-{number}")
    for path in sorted(DOCS.rglob("*.md"))
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    )
]


def test_every_package_page_has_a_block_to_run() -> None:
    pages = {Path(str(param.values[1])).stem for param in BLOCKS}
    assert {"rl-schedule", "rl-metrics", "rl-dump", "rl-topp", "rl-runtime"} <= pages


@pytest.mark.parametrize(("block", "path"), BLOCKS)
def test_a_block_runs(block: str, path: Path) -> None:
    if "import torch" in block:
        pytest.importorskip("torch")
    exec(compile(block, str(path), "exec"), {})


def test_the_configuration_page_is_that_of_the_classes() -> None:
    spec = importlib.util.spec_from_file_location(
        "configuration_page", Path(__file__).parent / "configuration_page.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), (
        "run python packages/rl-runtime/tests/docs/configuration_page.py"
    )


def test_every_page_is_in_the_navigation() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert [
        path.name
        for path in DOCS.rglob("*.md")
        if path.relative_to(DOCS).as_posix() not in navigation
    ] == []


def test_the_sample_that_is_drawn_is_one_as_a_batch_holds_it() -> None:
    answer, tool = (
        NucleusSet.from_lists([[21, 9]], vocab_size=32),
        NucleusSet.not_sampled(1, vocab_size=32),
    )
    sample = Sample(
        rollout_id=0,
        group_id=0,
        sample_index=0,
        prompt_tokens=np.array([11, 12]),
        response_tokens=np.array([21, 22, 23]),
        loss_mask=np.array([1, 0, 1], np.int32),
        rollout_log_probs=np.array([-0.5, 0.0, -1.25], np.float32),
        weight_versions=np.array([3, -1, 4]),
        nucleus=NucleusSet.concat(
            [answer, tool, NucleusSet.from_lists([[23, 5, 6]], vocab_size=32)], vocab_size=32
        ),
        reward=1.0,
    )
    columns = batch_columns([sample], divide_by_std=False)
    page = (DOCS / "contracts.md").read_text(encoding="utf-8")
    drawn = {
        name: [float(number) for number in re.findall(r"-?(?:\d*\.\d+|\d+)", row)]
        for name, row in re.findall(r"^    (\w+) +\[(.*?)\]", page, re.MULTILINE)
    }
    assert len(drawn) == 7
    assert drawn == {name: columns[name][0].tolist() for name in drawn}


def test_the_page_of_contracts_has_the_dtypes_of_a_batchs_columns() -> None:
    """A row names one field or several, `a`, `b`, and as many dtypes, or one for all."""
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|", (DOCS / "contracts.md").read_text(), re.MULTILINE
    )
    stated: dict[str, str] = {}
    for cell, types in rows:
        names = re.findall(r"`(\w+)`", cell)
        dtypes = re.findall(r"(\w+) \[", types)
        stated |= dict(zip(names, dtypes * len(names) if len(dtypes) == 1 else dtypes, strict=True))
    assert {name: dtype for name, dtype in stated.items() if name in COLUMN_TYPES} == {
        name: dtype for name, (dtype, _) in COLUMN_TYPES.items()
    }
