"""Attention over whole batches equals a loop over sequences in float64."""

import ast
import importlib.util
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from rl_runtime.engine import cpu_attention
from rl_runtime.engine.cpu_attention import attend_decode, attend_extend

G, H, D = 2, 6, 8


def cache(lengths: list[int], rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of each sequence, drawn without order from one cache; rows are padded with slot 0."""
    slots = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    free = iter(torch.randperm(sum(lengths) + 5, generator=rng).tolist())
    for row, length in enumerate(lengths):
        slots[row, :length] = torch.tensor([next(free) for _ in range(length)])
    shape = (sum(lengths) + 5, G, D)
    return slots, torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


def reference(
    queries: Tensor, positions: npt.ArrayLike, keys: Tensor, values: Tensor
) -> npt.NDArray[np.float64]:
    """One sequence, float64: queries [n, H, D] at `positions` over keys [L, G, D]."""
    keys_LHD, values_LHD = (
        np.repeat(cached.double().numpy(), H // G, axis=1) for cached in (keys, values)
    )
    logits = np.einsum("qhd,khd->hqk", queries.double().numpy(), keys_LHD) / np.sqrt(D)
    logits[:, np.arange(len(keys_LHD)) > np.asarray(positions)[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    output: npt.NDArray[np.float64] = np.einsum(
        "hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values_LHD
    )
    return output


@pytest.mark.parametrize("group_elements", [1, 500, 1 << 24])
def test_decode_attends_to_the_whole_sequence_however_rows_are_grouped(
    monkeypatch: pytest.MonkeyPatch, group_elements: int
) -> None:
    monkeypatch.setattr(cpu_attention, "_GROUP_ELEMENTS", group_elements)
    rng = torch.Generator().manual_seed(0)
    lengths = [1, 7, 3, 12, 5]
    slots, keys, values = cache(lengths, rng)
    queries = torch.randn(len(lengths), H, D, generator=rng)
    output = torch.full_like(queries, torch.nan)
    attend_decode(queries, output, keys, values, slots, torch.tensor(lengths), None)
    for row, length in enumerate(lengths):
        own = slots[row, :length]
        np.testing.assert_allclose(
            output[row : row + 1],
            reference(queries[row : row + 1], [length - 1], keys[own], values[own]),
            atol=2e-6,
        )


@pytest.mark.parametrize("group_elements", [1, 500, 1 << 24])
def test_extend_is_causal_after_prefixes_of_any_length(
    monkeypatch: pytest.MonkeyPatch, group_elements: int
) -> None:
    monkeypatch.setattr(cpu_attention, "_GROUP_ELEMENTS", group_elements)
    rng = torch.Generator().manual_seed(1)
    prefixes, news = [0, 4, 9, 0, 2], [3, 1, 2, 8, 5]
    lengths = [prefix + new for prefix, new in zip(prefixes, news, strict=True)]
    slots, keys, values = cache(lengths, rng)
    queries = torch.randn(sum(news), H, D, generator=rng)
    output = torch.full_like(queries, torch.nan)
    attend_extend(
        queries, output, keys, values, slots, torch.tensor(lengths), torch.tensor(news), None
    )
    start = 0
    for row, (prefix, new) in enumerate(zip(prefixes, news, strict=True)):
        own, mine = slots[row, : lengths[row]], slice(start, start + new)
        expected = reference(queries[mine], prefix + np.arange(new), keys[own], values[own])
        np.testing.assert_allclose(output[mine], expected, atol=2e-6)
        start += new


@pytest.mark.parametrize(
    ("name", "positional"),
    [
        ("_run_sdpa_forward_decode", cpu_attention._Decode),
        ("_run_sdpa_forward_extend", cpu_attention._Extend),
    ],
)
def test_the_hooks_take_what_sglang_passes(name: str, positional: object) -> None:
    """Parameters of the hooked function are read from SGLang's source.

    After `self`, our positional ones end with the encoder lengths, and the rest are our options.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    backend = "srt/layers/attention/torch_native_backend.py"
    tree = ast.parse((Path(spec.origin).parent / backend).read_text())
    (function,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    names = [argument.arg for argument in function.args.args][1:]
    count = len(get_args(positional))
    assert names[count - 1] == "encoder_lens"
    assert set(names[count:]) == set(cpu_attention._Options.__annotations__)
