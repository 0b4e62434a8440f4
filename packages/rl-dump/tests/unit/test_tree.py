"""What a pickle built is of a sane size and kind."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from rl_dump import DumpError
from rl_dump.archive.tree import check_tree
from rl_dump.columns.tagged_json import MAX_DEPTH


def test_plain_data_passes() -> None:
    check_tree(
        {"samples": [{"a": 1, "b": [1.5, None, "x", (True, b"y")], "c": np.float32(1)}]}, "f"
    )


def test_shared_containers_pass() -> None:
    shared = {"x": [1, 2, 3]}
    check_tree([shared] * 100_000, "f")


def test_doubling_is_refused_without_being_walked() -> None:
    node: list[Any] = [0]
    for _ in range(60):
        node = [node, node]
    start = time.process_time()
    with pytest.raises(DumpError, match="expands to more than"):
        check_tree(node, "f")
    assert time.process_time() - start < 1


def test_cycles_and_depth_are_refused() -> None:
    loop: list[Any] = []
    loop.append({"x": (loop,)})
    with pytest.raises(DumpError, match="a container inside itself"):
        check_tree(loop, "f")
    deep: list[Any] = []
    for _ in range(MAX_DEPTH + 2):
        deep = [deep]
    with pytest.raises(DumpError, match="nested deeper"):
        check_tree(deep, "f")


@pytest.mark.parametrize("leaf", [object(), {1}, 1j, np.dtype("f4"), print])
def test_other_leaves_are_refused_by_type(leaf: object) -> None:
    with pytest.raises(DumpError, match="where data should be"):
        check_tree({"x": [leaf]}, "f")
