"""Counts the statements of every package's sources: the size that counts, whatever the line length.

A statement is an `ast.stmt` node; expressions that are a bare constant (docstrings, field
documentation, `...`) do not count. Usage: statements.py [ROOT]. Prints a row for each package and
the sum.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

__all__ = ["count_statements"]


def count_statements(text: str) -> int:
    r"""Count the statements of one module's source text.

    Returns:
        The number; `"def f():\n    'Doc.'\n    return 1"` has 2.
    """
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(ast.parse(text))
    )


def main(root: Path) -> None:
    """Print the table."""
    total = 0
    for package in sorted(path.parent for path in root.glob("packages/*/pyproject.toml")):
        sources = sorted(package.glob("src/**/*.py"))
        count = sum(count_statements(path.read_text(encoding="utf-8")) for path in sources)
        total += count
        sys.stdout.write(f"{package.name:<12} {len(sources):>4} modules {count:>7,} statements\n")
    sys.stdout.write(
        f"{'sum':<12} {total:>12} {'statements':>18}\n".replace(str(total), f"{total:,}")
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
