"""The code blocks of the documentation run; generated pages are current; every page stands in the navigation."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

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


def test_the_sample_that_is_drawn_is_the_frozen_one() -> None:
    content = json.loads(
        (
            DOCS.parent / "packages/rl-runtime/tests/golden/rollout-batch.v1/three_samples.json"
        ).read_text()
    )["arrays"]
    assert content["tokens"][:5] == [11, 12, 21, 22, 23]
    assert content["loss_masks"][:3] == [1, 0, 1]
    assert content["nucleus_offsets"][:4] == [0, 2, 2, 5]
    assert content["nucleus_ids"][:5] == [21, 9, 23, 5, 6]
    assert content["rollout_log_probs"][:3] == [-0.5, 0.0, -1.25]
    assert content["weight_versions"][:3] == [3, 3, 4]
