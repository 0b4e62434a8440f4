"""Converting loses nothing, in either direction."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_dump import convert, open_dump

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.uint16,
]


@st.composite
def field(draw: st.DrawFn, count: int) -> list[Any]:
    kind = draw(
        st.sampled_from(
            [
                "tensor",
                "scalar tensor",
                "number",
                "list",
                "text",
                "object",
                "generic",
                "array",
                "wide",
            ]
        )
    )
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    lengths = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    missing = draw(st.booleans())
    makers: dict[str, Callable[[int], Any]] = {
        "tensor": lambda n: (torch.randn(n, generator=generator) * 50).to(dtype),
        "wide": lambda n: (torch.randn(n, 3, generator=generator) * 50).to(dtype),
        "scalar tensor": lambda n: torch.tensor(n * 1.5).to(dtype),
        "number": lambda n: [n, n * 0.5, bool(n)][seed % 3],
        "list": lambda n: [[n] * n, [n * 0.5] * n][seed % 2],
        "text": lambda n: "é" * n,
        "object": lambda n: {
            "n": n,
            "t": torch.full((n,), 1.5).to(dtype),
            "s": (n, [None, b"x"]),
            "x": np.arange(n, dtype=np.int16),
        },
        "generic": np.float32,
        "array": lambda n: np.arange(n, dtype=np.float32),
    }
    make = makers[kind]
    values = [make(n) for n in lengths]
    return [None, *values[1:]] if missing and count else values


@st.composite
def archives(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(0, 4))
    names = (
        draw(
            st.lists(
                st.sampled_from(["a", "b", "c", "my_field"]), unique=True, min_size=1, max_size=3
            )
        )
        if count
        else []
    )
    fields = {name: draw(field(count)) for name in names}
    samples = [{name: values[row] for name, values in fields.items()} for row in range(count)]
    raw = draw(st.sampled_from([None, [0.5, float("nan")], []]))
    top = {} if raw is None else {"raw_reward": raw}
    return {
        "format_version": 2,
        "rollout_id": draw(st.sampled_from([0, 17, "eval_2"])),
        "rank": 1,
        "samples": samples,
        "dp_shards": [{"rank": 1, "partition": [0, 1]}],
        **top,
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(left, right)
        )
    if isinstance(left, (np.ndarray, np.generic)):
        return (
            type(left) is type(right)
            and left.dtype == right.dtype
            and np.array_equal(left, right, equal_nan=True)
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or left != left)


@settings(max_examples=25)
@given(archives())
def test_an_archive_converted_there_and_back_holds_the_same_samples(root: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(root, folder / "a.pt")
        there = convert(folder / "a.pt", folder / "b.parquet")
        back = convert(there, folder / "c.pt")
        found = torch.load(back, weights_only=False)
        assert same(root["samples"], found["samples"])
        assert all(same(root[key], found[key]) for key in root)
        again = convert(back, folder / "d.parquet")
        with open_dump(there) as first, open_dump(again) as second:
            assert repr({**first.header, "row_groups": 0}) == repr(
                {**second.header, "row_groups": 0}
            )
