"""Whether what a pickle built is data of a sane size: plain types, no cycles, no doubling.

Forty lists, each holding the one before twice, take 200 bytes in a file and a terabyte as text.
Every later step may walk the whole tree once this check has passed.

Invariants, each matched by a test in `tests/unit/test_tree.py`: after `check_tree`, the tree is at
most `MAX_DEPTH` deep and has at most `MAX_NODES` nodes counted with repetition, and every leaf is a
plain value or a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_dump.archive.tensors import NumpyArray, TensorRef
from rl_dump.columns.tagged_json import MAX_DEPTH
from rl_dump.errors import DumpError

__all__ = ["MAX_NODES", "check_tree"]

MAX_NODES = 200_000_000
"""Most nodes, counted with repetition.

A batch of 4,096 samples with Python lists of 8,192 floats in five fields has 170 million.
"""

_CONTAINERS = (dict, list, tuple)
_LEAVES = (str, bytes, int, float, bool, type(None), np.generic, NumpyArray, TensorRef)


def check_tree(root: Any, where: str) -> None:
    """Refuse a tree that is not plain data of a sane size.

    Args:
        root: what the pickle built.
        where: what to name in errors.

    Raises:
        DumpError: a value of another type, a cycle, too much nesting, or too many nodes.
    """
    sizes: dict[int, int] = {}
    # Explicit stack: depth is checked before Python's own limit would be.
    stack: list[tuple[Any, int, bool]] = [(root, 0, False)]
    open_nodes: set[int] = set()
    while stack:
        node, depth, done = stack.pop()
        key = id(node)
        if done:
            open_nodes.discard(key)
            sizes[key] = _size(node, sizes, where)
            continue
        if key in sizes:
            continue
        if key in open_nodes or depth > MAX_DEPTH:
            raise DumpError(
                f"{where}: nested deeper than {MAX_DEPTH} levels, or a container inside itself;"
                " refused"
            )
        inner = _containers(node, where)
        if inner:
            open_nodes.add(key)
            stack.append((node, depth, True))
            stack.extend((child, depth + 1, False) for child in inner)
        elif isinstance(node, _CONTAINERS):
            sizes[key] = 1 + len(node)


def _containers(node: Any, where: str) -> list[Any]:
    """Return the children that are containers themselves, and refuse leaves of other types."""
    if not isinstance(node, _CONTAINERS):
        _check_types({type(node)}, where)
        return []
    children = node.values() if isinstance(node, dict) else node
    types = set(map(type, children))
    _check_types(types, where)
    return (
        [child for child in children if isinstance(child, _CONTAINERS)]
        if types & set(_CONTAINERS)
        else []
    )


def _check_types(types: set[type], where: str) -> None:
    for kind in types:
        if not issubclass(kind, (*_LEAVES, *_CONTAINERS)):
            raise DumpError(
                f"{where}: holds a {kind.__name__.strip('_')} where data should be; refused"
            )


def _size(node: Any, sizes: dict[int, int], where: str) -> int:
    children = node.values() if isinstance(node, dict) else node
    total = 1 + sum(sizes.get(id(child), 1) for child in children)
    if total > MAX_NODES:
        raise DumpError(f"{where}: expands to more than {MAX_NODES} values; refused")
    return total
