"""Checks that every package has the skeleton, and that sizes, names and docstrings keep within the
house rules.

Standard library only. Prints every problem and exits 1 when there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "pyproject.toml",
    "benchmarks",
    "tests/test_public_api.py",
    "tests/test_bare_import.py",
]
FOLDERS = ["unit", "property", "golden", "distributed", "stubs"]
MODULES = ["__init__.py", "contract.py", "errors.py", "py.typed", "schemas"]
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc"}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80
NOT_NEEDED = {"rl-schedule": {"distributed", "stubs"}, "rl-metrics": {"stubs"}}
"""Tiers that a package has no use for: it starts no processes, or meets neither a topology nor an engine."""


def missing_parts(package: Path) -> Iterator[str]:
    """List parts of the skeleton that a package lacks."""
    source = package / "src" / package.name.replace("-", "_")
    tests = [f"tests/{name}" for name in FOLDERS if name not in NOT_NEEDED.get(package.name, set())]
    wanted = [*(package / name for name in [*FILES, *tests]), *(source / name for name in MODULES)]
    for path in wanted:
        if not path.exists() or (
            path.is_dir() and not any(entry.is_file() for entry in path.rglob("*"))
        ):
            yield f"{path.relative_to(ROOT)}: missing or empty"
    changelog = package / "CHANGELOG.md"
    if changelog.exists() and "### Contracts" not in changelog.read_text(encoding="utf-8"):
        yield f"{changelog.relative_to(ROOT)}: has no heading 'Contracts'"


def size_problems(path: Path) -> Iterator[str]:
    """List what is too long in a source, a test or a benchmark: the module, or one of its functions."""
    where = path.relative_to(ROOT)
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines > MAX_MODULE_LINES:
        yield f"{where}: {lines} lines, at most {MAX_MODULE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield (
                    f"{where}:{node.lineno}: function {node.name} has {length} lines, at most"
                    f" {MAX_FUNCTION_LINES}"
                )


def module_problems(path: Path) -> Iterator[str]:
    """List what is wrong with one module of a package: its name, its docstrings, its `__all__`."""
    where = path.relative_to(ROOT)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.stem in VAGUE:
        yield f"{where}: the name says nothing; name the module for what it decides"
    if ast.get_docstring(tree) is None:
        yield f"{where}: has no docstring"
    if (
        path.stem != "__main__"
        and len(tree.body) > 1
        and not any(_assigns_all(node) for node in tree.body)
    ):
        yield f"{where}: declares no __all__"
    yield from (
        f"{where}:{line}: {name} has no docstring" for line, name in _undocumented(tree.body)
    )


def _assigns_all(node: ast.stmt) -> bool:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _undocumented(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for node in body:
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and not node.name.startswith("_"):
            is_overload = any(
                "overload" in ast.unparse(item) or "setter" in ast.unparse(item)
                for item in node.decorator_list
            )
            if ast.get_docstring(node) is None and not is_overload:
                yield node.lineno, node.name
            if isinstance(node, ast.ClassDef):
                yield from _undocumented(node.body)


def main() -> int:
    """Check all packages; returns the exit status."""
    packages = [path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    problems = [problem for package in packages for problem in missing_parts(package)]
    for package in packages:
        problems += [
            problem for path in sorted(package.glob("*/**/*.py")) for problem in size_problems(path)
        ]
        problems += [
            problem
            for path in sorted(package.glob("src/**/*.py"))
            for problem in module_problems(path)
        ]
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
