"""The public names, so that adding or dropping one is a decision."""

import ast
import importlib
from pathlib import Path

import pytest

import rl_topp
from rl_topp import contract_header

SOURCE = Path(rl_topp.__file__).parent
NAMES = {
    "rl_topp": [
        "NucleusError",
        "NucleusSet",
        "NucleusStatus",
        "UnsupportedContractError",
        "align_rows",
        "from_sglang_meta",
        "kept_log_probs_from_sglang_meta",
        "to_wire",
    ],
    "rl_topp.torch": ["NucleusScores", "build_keep_mask", "nucleus_log_probs"],
    "rl_topp.lm_head": ["HiddenGradient", "Method", "nucleus_lm_head_log_probs"],
    "rl_topp.reference": [
        "ReferenceScores",
        "keep_mask",
        "nucleus",
        "nucleus_of_logits",
        "nucleus_scores",
        "score_gradient",
        "softmax",
    ],
}


@pytest.mark.parametrize("module", NAMES)
def test_the_public_names_are_these(module: str) -> None:
    if module in ("rl_topp.torch", "rl_topp.lm_head"):
        pytest.importorskip("torch")
    found = importlib.import_module(module)
    assert sorted(found.__all__) == NAMES[module]
    assert all(hasattr(found, name) for name in found.__all__)


def test_one_class_stands_for_another_contract() -> None:
    assert rl_topp.UnsupportedContractError is contract_header.UnsupportedContractError
    assert issubclass(rl_topp.UnsupportedContractError, ValueError)


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_every_module_has_a_docstring_and_every_public_name_too(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), path
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name}"
