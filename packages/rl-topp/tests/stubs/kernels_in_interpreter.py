"""Runs the CUDA way of the head on CPU tensors and compares it with the plain way.

A program of its own, because Triton's interpreter must be chosen before Triton is imported: `python
kernels_in_interpreter.py` exits 0 or says what differs.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rl_topp import NucleusSet
from rl_topp.lm_head import cuda, kernels, nucleus_lm_head_log_probs, plain
from rl_topp.lm_head.triton_entries import KernelShapes

WAYS = {"torch": plain, "triton": cuda}
TINY = KernelShapes(
    score_entries=4,
    score_block=8,
    hidden_entries=2,
    hidden_block=8,
    weight_entries=2,
    weight_block=8,
    chunk=4,
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
COMMON_ID = 3


def run(way: str, rows: NucleusSet, operands: tuple[Any, ...], **options: Any) -> list[Any]:
    kernels.kernels_on = lambda device: WAYS[way]
    hidden, weight, targets, upstream = operands
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    scores = nucleus_lm_head_log_probs(
        hidden, weight, targets, rows, entropy=True, hidden_gradient="partial", **options
    )
    found = [
        value
        for value in (scores.log_probs, scores.entropy, scores.full_log_probs)
        if value is not None
    ]
    sum((value * weights).sum() for value, weights in zip(found, upstream, strict=False)).backward()
    return [*found, hidden.grad, weight.grad]


def random_rows(
    rng: np.random.Generator, num_rows: int, vocab_size: int, largest: int
) -> NucleusSet:
    """Return rows of every status; one id is in nearly every set: its run spans several chunks."""
    status = rng.choice([0, 0, 0, 1, 2, 3], num_rows)
    ids = [
        (
            np.union1d(
                rng.choice(vocab_size, rng.integers(1, largest + 1), replace=False),
                [COMMON_ID] if rng.random() < 0.9 else [],
            )
            if kind in (0, 3)
            else np.zeros(0)
        )
        for kind in status
    ]
    offsets = np.concatenate([[0], np.cumsum([row.size for row in ids])])
    return NucleusSet(
        ids=np.concatenate(ids).astype(np.int32),
        offsets=offsets,
        status=status,
        vocab_size=vocab_size,
    )


def check(
    seed: int,
    *,
    num_rows: int,
    vocab_size: int,
    local: int,
    width: int,
    largest: int,
    dtype: Any,
    shapes: KernelShapes = TINY,
    **options: Any,
) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    rows = random_rows(rng, num_rows, vocab_size, largest)
    hidden, weight = (
        torch.randn(count, width, dtype=torch.float64).to(dtype) for count in (num_rows, local)
    )
    operands = (
        hidden,
        weight,
        torch.tensor(rng.integers(0, vocab_size, num_rows)),
        torch.randn(3, num_rows, dtype=torch.float64),
    )
    cuda._SHAPES = shapes
    plain, kernels, again = (
        run(way, rows, operands, block_bytes=600, **options)
        for way in ("torch", "triton", "triton")
    )
    for left, right, repeated in zip(plain, kernels, again, strict=True):
        # A target on another shard scores -inf here, a set on another shard NaN, on both ways.
        torch.testing.assert_close(
            right, left, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True
        )
        torch.testing.assert_close(repeated, right, atol=0, rtol=0, equal_nan=True)
    for gradient in plain[-2:]:
        assert gradient.isfinite().all()


def check_overflow(method: str) -> None:
    """Check that a support of nothing but -inf scores NaN, never the 0 of a row without a score."""
    hidden = torch.tensor([[3e38, 0.0], [1.0, 0.5], [0.0, 0.0], [3e38, 0.0], [3e38, 0.0]])
    weight = torch.tensor([[-10.0, 0.1], [-10.0, 0.2], [-10.0, 0.3], [-10.0, 0.4]])
    rows = NucleusSet.concat(
        [
            NucleusSet.from_lists([[0, 1], [0, 1, 2], [1], None], vocab_size=4),
            NucleusSet.not_sampled(1, vocab_size=4),
        ]
    )
    operands = (hidden, weight, torch.tensor([0, 2, 1, 3, 0]), torch.ones(3, len(rows)))
    for way in WAYS:
        log_probs, entropy, full, for_hidden, _ = run(
            way, rows, operands, method=method, full_log_probs=True
        )
        diverged = torch.tensor([True, False, False, True, False])
        for found in (log_probs, entropy, full, for_hidden[:, 0]):
            assert torch.equal(found.isnan(), diverged), (method, way, found)
        assert log_probs[4] == full[4] == 0.0
        kept_only = run(way, rows, operands, method=method)
        assert torch.equal(kept_only[0].isnan(), diverged), (method, way, kept_only[0])


if __name__ == "__main__":
    double, single, half = torch.float64, torch.float32, torch.bfloat16
    check(
        0,
        num_rows=14,
        vocab_size=17,
        local=20,
        width=13,
        largest=17,
        dtype=double,
        method="sparse",
        temperature=0.7,
    )
    check(
        1, num_rows=10, vocab_size=50, local=50, width=16, largest=20, dtype=single, method="sparse"
    )
    # One shard of a vocabulary alone: a group of this process, which holds the ids [32, 64), stands
    # for the ranks that hold the others.
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        shard: dict[str, Any] = {"vocab_start": 32, "tp_group": dist.group.WORLD}
        check(
            2,
            num_rows=10,
            vocab_size=90,
            local=32,
            width=12,
            largest=50,
            dtype=double,
            method="sparse",
            **shard,
        )
        dist.destroy_process_group()
    check(3, num_rows=1, vocab_size=5, local=5, width=3, largest=1, dtype=double, method="sparse")
    check(
        4,
        num_rows=30,
        vocab_size=30,
        local=30,
        width=20,
        largest=9,
        dtype=half,
        method="sparse",
        shapes=KernelShapes(),
        on_truncated="full",
    )
    check(
        5,
        num_rows=12,
        vocab_size=40,
        local=44,
        width=9,
        largest=8,
        dtype=double,
        method="blocked",
        temperature=1.3,
    )
    check(
        6,
        num_rows=12,
        vocab_size=40,
        local=44,
        width=9,
        largest=8,
        dtype=single,
        method="blocked",
        full_log_probs=True,
    )
    check(
        7,
        num_rows=12,
        vocab_size=40,
        local=40,
        width=9,
        largest=8,
        dtype=half,
        method="sparse",
        full_log_probs=True,
    )
    for method in ("sparse", "blocked"):
        check_overflow(method)
    print("ok")
