"""Inputs of gpu_lm_head.py, and what they score exactly."""

import numpy as np
import torch

from rl_topp import NucleusSet

VOCAB_SIZE = 151_936


def zipf_rows(
    rng: np.random.Generator, num_rows: int, mean: float, vocab_size: int = VOCAB_SIZE
) -> NucleusSet:
    """Draw log-normal set sizes of about `mean`; ids Zipf-distributed, none twice in a set."""
    sizes = np.clip(np.rint(rng.lognormal(-0.5, 1.0, num_rows) * mean), 1, vocab_size // 4).astype(
        np.int64
    )
    weights = 1.0 / np.arange(1, vocab_size + 1)
    cumulative = np.cumsum(weights / weights.sum())
    keys = np.zeros(0, np.int64)
    for attempt in range(60):
        missing = sizes - np.bincount(keys >> 32, minlength=num_rows)
        if not missing.any():
            break
        owners = np.repeat(np.arange(num_rows), missing)
        # Late attempts draw uniformly: the common ids of a large set are all taken by then.
        drawn = (
            np.searchsorted(cumulative, rng.random(owners.size))
            if attempt < 3
            else rng.integers(0, vocab_size, owners.size)
        )
        keys = np.unique(np.concatenate([keys, (owners << 32) | np.minimum(drawn, vocab_size - 1)]))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(keys >> 32, minlength=num_rows))])
    return NucleusSet(
        ids=keys & 0xFFFFFFFF,
        offsets=offsets,
        status=np.zeros(num_rows, np.uint8),
        vocab_size=vocab_size,
    )


def random_rows(
    rng: np.random.Generator, num_rows: int, vocab_size: int, largest: int
) -> NucleusSet:
    """Draw sets of 1 to `largest` ids, every status."""
    status = rng.choice([0, 0, 0, 0, 1, 2, 3], num_rows)
    sizes = np.where(
        (status == 0) | (status == 3),
        np.minimum(
            rng.integers(1, largest + 1, num_rows), rng.integers(1, vocab_size + 1, num_rows)
        ),
        0,
    )
    ids = [
        np.sort(rng.choice(vocab_size, size, replace=False)) if size else np.zeros(0, np.int64)
        for size in sizes
    ]
    return NucleusSet(
        ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        status=status,
        vocab_size=vocab_size,
    )


def operands(
    num_rows: int,
    num_ids: int,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(num_rows, width, device=device).to(dtype).requires_grad_()
    weight = (
        (torch.randn(num_ids, width, device=device) / width**0.5 * 2.0).to(dtype).requires_grad_()
    )
    return hidden, weight


def targets_in(rows: NucleusSet, rng: np.random.Generator, device: str = "cuda") -> torch.Tensor:
    """Return one kept id per row, or any id where there is no set."""
    any_id = rng.integers(0, rows.vocab_size, len(rows))
    sizes = rows.set_sizes
    chosen = rows.offsets[:-1] + (rng.random(len(rows)) * np.maximum(sizes, 1)).astype(np.int64)
    picked = rows.ids[np.minimum(chosen, max(rows.ids.size - 1, 0))] if rows.ids.size else any_id
    return torch.from_numpy(np.where(sizes > 0, picked, any_id)).to(device)


def exact(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    rows: NucleusSet,
    upstream: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return log-probs, and the gradients of their sum weighted by `upstream`, in float64.

    Row chunk by row chunk, from the same inputs.
    """
    device = hidden.device
    hidden64, weight64 = hidden.detach().double(), weight.detach().double()[: rows.vocab_size]
    log_probs = torch.zeros(len(rows), dtype=torch.float64, device=device)
    for_hidden, for_weight = (
        torch.zeros_like(hidden64),
        torch.zeros(weight.shape, dtype=torch.float64, device=device),
    )
    step = max(1, 2**29 // rows.vocab_size)
    for first in range(0, len(rows), step):
        part = rows.slice(first, min(first + step, len(rows)))
        chunk = slice(first, first + len(part))
        keep = torch.zeros(len(part), rows.vocab_size, dtype=torch.bool, device=device)
        owner = torch.from_numpy(np.repeat(np.arange(len(part)), part.set_sizes)).to(device)
        keep[owner, torch.from_numpy(part.ids.astype(np.int64)).to(device)] = True
        status = torch.from_numpy(part.status.astype(np.int64)).to(device)
        keep[torch.arange(len(part), device=device), targets[chunk]] = True
        keep |= (status == 1)[:, None]
        scored = (status <= 1)[:, None]
        z = (hidden64[chunk] @ weight64.t()).masked_fill_(~keep, -torch.inf)
        log_p = torch.log_softmax(z, dim=1)
        log_probs[chunk] = torch.where(
            scored[:, 0], log_p.gather(1, targets[chunk, None])[:, 0], 0.0
        )
        gradient = -torch.exp(log_p)
        gradient[torch.arange(len(part), device=device), targets[chunk]] += 1.0
        gradient *= torch.where(scored, upstream[chunk, None].double(), 0.0)
        for_hidden[chunk] = gradient @ weight64
        for_weight[: rows.vocab_size] += gradient.t() @ hidden64[chunk]
    return log_probs, for_hidden, for_weight


def relative(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    assert found is not None
    return float(
        torch.linalg.norm(found.double() - wanted) / torch.linalg.norm(wanted).clamp(min=1e-30)
    )
