"""Checks the house rules that no linter knows: skeleton, sizes, names, docstrings, raise style.

CONTRIBUTING.md says what they are for. Standard library only. Prints every problem and exits 1 when
there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import tomllib

__all__ = ["differing_copies", "missing_parts", "module_problems", "size_problems", "text_problems"]

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    "README.md",
    "CHANGELOG.md",
    "changes",
    "LICENSE",
    "pyproject.toml",
    "benchmarks",
    "tests/test_public_api.py",
    "tests/test_bare_import.py",
]
FOLDERS = ["unit", "property", "golden", "distributed", "stubs"]
MODULES = ["__init__.py", "errors.py", "py.typed"]
WRITER_MODULES = ["contract.py", "schemas"]
"""Parts of a package that writes a contract, by its entry points `rl.contracts.writes`."""
COPIED = "contract_header.py"
"""The machinery of contract headers: the same bytes in every package that has it."""
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc"}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80
NOT_NEEDED = {"rl-schedule": {"distributed", "stubs"}, "rl-metrics": {"stubs"}}
"""Tiers that a package has no use for: it starts no processes, or meets no topology or engine."""
DOUBLE_BACKTICK = re.compile("(?<!`)`{2}(?!`)")


def missing_parts(package: Path) -> Iterator[str]:
    """List parts of the skeleton that a package lacks."""
    source = package / "src" / package.name.replace("-", "_")
    tests = [f"tests/{name}" for name in FOLDERS if name not in NOT_NEEDED.get(package.name, set())]
    modules = MODULES + (WRITER_MODULES if _writes_a_contract(package) else [])
    wanted = [*(package / name for name in [*FILES, *tests]), *(source / name for name in modules)]
    for path in wanted:
        if not path.exists() or (
            path.is_dir() and not any(entry.is_file() for entry in path.rglob("*"))
        ):
            yield f"{_shown(path)}: missing or empty"


def _writes_a_contract(package: Path) -> bool:
    settings = package / "pyproject.toml"
    if not settings.exists():
        return False
    project = tomllib.loads(settings.read_text(encoding="utf-8"))["project"]
    return bool(project.get("entry-points", {}).get("rl.contracts.writes"))


def differing_copies(packages: Sequence[Path]) -> Iterator[str]:
    """List the copies of the machinery of contract headers that differ from the first one."""
    copies = [path for package in packages for path in sorted(package.glob(f"src/*/{COPIED}"))]
    for path in copies[1:]:
        if path.read_bytes() != copies[0].read_bytes():
            yield f"{_shown(path)}: differs from {_shown(copies[0])}"


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def text_problems(path: Path) -> Iterator[str]:
    """List what the house writes in one way only: raising, and code in prose."""
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if DOUBLE_BACKTICK.search(line):
            yield f"{_shown(path)}:{number}: double backticks; one is enough"
    for node in ast.walk(ast.parse(text)):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list):
                yield from (
                    f"{_shown(path)}:{line}: the message is assigned first; write it in the raise"
                    for line in _raises_of_a_name(body)
                )


def _raises_of_a_name(body: list[ast.stmt]) -> Iterator[int]:
    """Find `message = ...` followed by `raise Error(message)`."""
    for before, after in pairwise(body):
        match before, after:
            case (
                ast.Assign(targets=[ast.Name(id=assigned)]),
                ast.Raise(exc=ast.Call(args=[ast.Name(id=raised)])),
            ) if assigned == raised:
                yield after.lineno


def size_problems(path: Path) -> Iterator[str]:
    """List what is too long in a module: itself, or one of its functions."""
    where = _shown(path)
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
    where = _shown(path)
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
    problems += differing_copies(packages)
    tools = [ROOT / "noxfile.py", *sorted(ROOT.glob(".ci/*.py"))]
    for path in [*tools, *sorted(ROOT.glob("packages/*/*/**/*.py"))]:
        problems += [*size_problems(path), *text_problems(path)]
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        problems += module_problems(path)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
