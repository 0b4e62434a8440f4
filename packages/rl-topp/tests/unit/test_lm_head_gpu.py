"""The head on a GPU: kernels against plain torch in float64, repeatability, peak memory.

Run with `-m gpu`.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rl_topp import NucleusSet

torch = pytest.importorskip("torch")

from rl_topp.lm_head import Method, nucleus_lm_head_log_probs  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LIMITS = {torch.bfloat16: (2e-3, 4e-3), torch.float32: (1e-4, 1e-5), torch.float64: (1e-10, 1e-10)}


def _run(
    operands: Sequence[Any], rows: NucleusSet, upstream: Any, method: Method
) -> tuple[Any, ...]:
    hidden, weight = (operand.clone().requires_grad_() for operand in operands[:2])
    scores = nucleus_lm_head_log_probs(
        hidden, weight, operands[2], rows, method=method, entropy=True, temperature=0.8
    )
    assert scores.entropy is not None
    torch.autograd.backward(((scores.log_probs + scores.entropy) * upstream).sum())
    return scores.log_probs.detach(), scores.entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("method", ["auto", "sparse", "blocked"])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "width", "largest"),
    [(1, 5, 3, 5), (300, 5_000, 257, 5_000), (2_000, 40_000, 512, 20)],
)
def test_the_gpu_agrees_with_float64_on_the_cpu(
    num_rows: int,
    vocab_size: int,
    width: int,
    largest: int,
    dtype: Any,
    method: Method,
    random_rows: Callable[..., NucleusSet],
) -> None:
    rng = np.random.default_rng(num_rows)
    rows = random_rows(rng, num_rows, vocab_size, largest=largest)
    hidden, weight = (
        torch.from_numpy(rng.normal(size=shape)).to(dtype)
        for shape in ((num_rows, width), (vocab_size + 7, width))
    )
    weight *= width**-0.5
    targets, upstream = (
        torch.from_numpy(rng.integers(0, vocab_size, num_rows)),
        torch.from_numpy(rng.normal(size=num_rows)),
    )
    expected = _run((hidden.double(), weight.double(), targets), rows, upstream, "sparse")
    operands = [tensor.cuda() for tensor in (hidden, weight, targets)]
    found, again = (_run(operands, rows, upstream.cuda(), method) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(found, again, strict=True))
    score_limit, gradient_limit = LIMITS[dtype]
    for left, right in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(left.cpu().double(), right, atol=score_limit, rtol=0)
    for left, right in zip(found[2:], expected[2:], strict=True):
        assert torch.linalg.norm(left.cpu().double() - right) <= gradient_limit * torch.linalg.norm(
            right
        ).clamp(min=1e-12)


def test_nothing_waits_for_the_device(random_rows: Callable[..., NucleusSet]) -> None:
    rng = np.random.default_rng(1)
    rows = random_rows(rng, 500, 10_000, statuses=(0, 2), largest=30)
    hidden, weight = (
        torch.randn(size, 64, device="cuda", dtype=torch.bfloat16) for size in (500, 10_000)
    )
    targets, upstream = (
        torch.from_numpy(rng.integers(0, 10_000, 500)).cuda(),
        torch.randn(500, device="cuda"),
    )
    _run((hidden, weight, targets), rows, upstream, "sparse")  # compiles the kernels
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is called a prototype each time it is set
        torch.cuda.set_sync_debug_mode("error")
        try:
            _run((hidden, weight, targets), rows, upstream, "sparse")
        finally:
            torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_the_gradients_of_few_rows_are_rounded_once(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows = NucleusSet.unfiltered(num_rows, vocab_size=3_000)
    hidden, weight = (
        torch.randn(size, 96, generator=generator).bfloat16() for size in (num_rows, 3_000)
    )
    targets, upstream = torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.float64)
    upstream[0] = 1.0  # one coefficient makes a whole row of the weight's gradient
    expected = _run((hidden.double(), weight.double(), targets), rows, upstream, "blocked")
    found = _run((hidden.cuda(), weight.cuda(), targets.cuda()), rows, upstream.cuda(), "blocked")
    for left, right in zip(found[2:], expected[2:], strict=True):
        best = torch.linalg.norm(right.bfloat16().double() - right)
        assert torch.linalg.norm(
            left.cpu().double() - right
        ) <= 1.02 * best + 1e-4 * torch.linalg.norm(right)


@pytest.mark.parametrize("status", [0, 1])
def test_peak_memory_stays_far_below_one_block_of_logits(
    status: int, random_rows: Callable[..., NucleusSet]
) -> None:
    num_rows, vocab_size, width = 4_096, 100_000, 64
    rows = random_rows(
        np.random.default_rng(0), num_rows, vocab_size, statuses=(status,), largest=9
    )
    hidden = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab_size, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocab_size, (num_rows,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.backward(
        nucleus_lm_head_log_probs(hidden, weight, targets, rows, block_bytes=2**26).log_probs.sum()
    )
    assert (
        torch.cuda.max_memory_allocated() - before < num_rows * vocab_size * 2 / 2
    )  # half of the logits in bfloat16
