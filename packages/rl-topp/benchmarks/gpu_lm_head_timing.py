"""How gpu_lm_head.py times and reports: calls, medians between CUDA events, peak memory."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lm_head_cases import VOCAB_SIZE

from rl_topp import NucleusSet
from rl_topp.lm_head import nucleus_lm_head_log_probs

DEVICE = torch.device("cuda")
SHAPES = {"small": (8_192, VOCAB_SIZE, 2_048), "large": (16_384, VOCAB_SIZE, 3_584)}
FIGURES: dict[str, Any] = {}
LINES: list[str] = []
SHORT: list[str] = []


def say(line: str, *, short: bool = False) -> None:
    """Print a line and keep it; short ones are printed again at the end."""
    print(line, flush=True)
    LINES.append(line)
    if short:
        SHORT.append(line)


def milliseconds(call: Callable[[], Any], repeats: int = 15, warm_up: int = 3) -> float:
    times = []
    for index in range(warm_up + repeats):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if index >= warm_up:
            times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def host_milliseconds(call: Callable[[], Any], repeats: int = 15) -> float:
    """Return the median time until everything is handed to an idle device."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(times)


def peak_gib(call: Callable[[], Any], *operands: torch.Tensor) -> float:
    """Return the most memory that a call takes beyond what is allocated before it.

    Gradients of `operands` that an earlier call left do not count.
    """
    for operand in operands:
        operand.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**30


def head_call(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    rows: NucleusSet,
    backward: bool = True,
    **options: Any,
) -> Callable[[], None]:
    def call() -> None:
        hidden.grad = weight.grad = None
        scores = nucleus_lm_head_log_probs(hidden, weight, targets, rows, **options)
        if backward:
            scores.log_probs.sum().backward()  # type: ignore[no-untyped-call]

    return call


def masked_call(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor
) -> Callable[[], None]:
    def call() -> None:
        hidden.grad = weight.grad = None
        logits = (hidden @ weight.t()).float().masked_fill(~mask, -torch.inf)
        torch.log_softmax(logits, dim=1).gather(1, targets[:, None]).sum().backward()  # type: ignore[no-untyped-call]

    return call


def unmasked_call(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> Callable[[], None]:
    def call() -> None:
        hidden.grad = weight.grad = None
        torch.nn.functional.cross_entropy(
            (hidden @ weight.t()).float(), targets, reduction="sum"
        ).backward()  # type: ignore[no-untyped-call]

    return call


def mask_of(rows: NucleusSet) -> torch.Tensor:
    mask = torch.zeros(len(rows), rows.vocab_size, dtype=torch.bool, device=DEVICE)
    owner = torch.from_numpy(np.repeat(np.arange(len(rows)), rows.set_sizes)).to(DEVICE)
    mask[owner, torch.from_numpy(rows.ids.astype(np.int64)).to(DEVICE)] = True
    return mask
