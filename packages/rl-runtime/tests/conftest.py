"""Leave out tests whose libraries are not installed; a small profile for properties."""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("rl-runtime", deadline=None, max_examples=100)
settings.register_profile("small", deadline=None, max_examples=20)
settings.load_profile("rl-runtime")

_HERE = Path(__file__).parent
# Modules that tests share, such as `near_ties`: in importlib mode pytest adds no folder itself.
sys.path.append(str(_HERE))
_ENGINES = (
    "torch",
    "ray",
    "transformers",
    "tokenizers",
    "sglang",
    "megatron",
    "reasoning_gym",
    "tensorboard",
    "safetensors",
)


_FOUND = {name: importlib.util.find_spec(name) for name in _ENGINES}
_ABSENT = {name for name, spec in _FOUND.items() if spec is None}
_STAND_INS = {
    name
    for name, spec in _FOUND.items()
    if spec is not None and "/tests/stubs/" in (spec.origin or "")
}
_PACKAGE = importlib.util.find_spec("rl_runtime")
assert _PACKAGE is not None
assert _PACKAGE.submodule_search_locations is not None
_SOURCES = Path(next(iter(_PACKAGE.submodule_search_locations)))


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement that importing a file executes, those in `with` and `try` blocks too."""
    for node in body:
        yield node
        yield from _statements(node.body if isinstance(node, ast.With | ast.Try) else [])


def _imports(path: Path, seen: set[str]) -> set[str]:
    """Name every library that importing a file loads, through our own modules."""
    found: set[str] = set()
    for node in _statements(ast.parse(path.read_text()).body):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom) and node.module
            else []
        )
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            found.add(name.partition(".")[0])
            if name in {"rl_metrics.torch", "rl_dump.torch", "rl_topp.torch"}:
                found.add("torch")
            if name.startswith("rl_runtime.") and name not in seen:
                seen.add(name)
                module = _SOURCES.joinpath(*name.split(".")[1:])
                for source in (module.with_suffix(".py"), module / "__init__.py"):
                    found |= _imports(source, seen) if source.exists() else set()
    return found


_NEEDS_ENGINES_WHILE_IT_RUNS = {
    "test_cli.py",
    "test_config.py",
    "test_engine.py",
    "test_preflight.py",
    "test_supervisor.py",
    "test_tiny_model.py",
}
"""Tests that import an engine or its tasks while they run, or read the recipes of the checkout."""


def _needs_what_is_not_here(path: Path) -> set[str]:
    # Only the tests in `stubbed` are made for the stand-ins.
    return _imports(path, set()) & (_ABSENT if "stubbed" in path.parts else _ABSENT | _STAND_INS)


collect_ignore = []
if _ABSENT:
    collect_ignore = ["distributed", "e2e", "contracts", "docs"]
    collect_ignore += [
        str(path)
        for path in _HERE.rglob("test_*.py")
        if path.name in _NEEDS_ENGINES_WHILE_IT_RUNS or _needs_what_is_not_here(path)
    ]
    collect_ignore += [
        str(path.parent) for path in _HERE.glob("*/**/conftest.py") if _needs_what_is_not_here(path)
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, so that the tests also run outside the workspace."""
    markers = {
        "slow": "starts a server",
        "distributed": "starts gloo processes",
        "fuzz": "large counts",
        "gpu": "needs an accelerator",
        "e2e": "end to end",
    }
    for marker, meaning in markers.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
