"""Runs the plugin's CUDA kernels on CPU tensors through Triton's interpreter, against float64.

Exits 0 and prints ok, or says what differs.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from stubs.near_ties import FLOAT32_ROUNDING, check_nucleus

from rl_topp.sglang.draw import Filters
from rl_topp.sglang.kernels import draw_step_on_device
from rl_topp.sglang.step import StepRows


def check(
    rng: np.random.Generator,
    vocab_size: int,
    prefix_size: int,
    block: int,
    *,
    exact_ties: bool,
    whole: bool,
) -> None:
    """Check a batch with every kind of filter against the reference.

    `exact_ties` makes probabilities multiples of 2**-12, so that ties are many and sums exact.
    """
    num_rows = 6
    concentration = rng.choice([0.02, 0.5, 5.0])
    probs = np.stack(
        [
            rng.multinomial(4096, rng.dirichlet(np.full(vocab_size, concentration))) / 4096
            for _ in range(num_rows)
        ]
    )
    if not exact_ties:
        probs = np.stack(
            [rng.dirichlet(np.full(vocab_size, concentration)) for _ in range(num_rows)]
        )
    probs = probs.astype(np.float32)
    top_k = rng.choice([1, 2, 7, vocab_size, 1 << 30], num_rows)
    top_p = rng.choice([0.1, 0.5, 0.9, 1.0], num_rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.03, 0.3], num_rows).astype(np.float32)
    uniform = rng.random(num_rows).astype(np.float32)
    is_filtered = rng.random(num_rows) < 0.7 if whole else None
    filters = Filters(
        top_ks=torch.tensor(top_k, dtype=torch.int32),
        top_ps=torch.tensor(top_p),
        min_ps=torch.tensor(min_p),
    )
    step = draw_step_on_device(
        torch.tensor(probs),
        filters,
        torch.tensor(uniform),
        None if is_filtered is None else torch.tensor(is_filtered),
        prefix_size=prefix_size,
        block=block,
    )
    rows = StepRows(step, [True] * num_rows)
    for b in range(num_rows):
        recorded, log_prob = rows.row(b)
        row, sampled = probs[b].astype(np.float64), int(step.ids_B[b])
        if is_filtered is not None and not is_filtered[b]:
            assert recorded is None
            ids = np.flatnonzero(row).tolist()
        else:
            assert recorded is not None
            ids = recorded
            check_nucleus(
                ids,
                row,
                top_k=min(int(top_k[b]), vocab_size),
                top_p=float(top_p[b]),
                min_p=float(min_p[b]),
                rounding=FLOAT32_ROUNDING,
            )
        assert sampled in ids, (b, sampled, ids)
        assert abs(log_prob - np.log(row[sampled] / row[ids].sum())) < 1e-4, (b, log_prob)


def check_distribution() -> None:
    """Check that evenly spaced uniform numbers draw each id in proportion, in either kernel."""
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.05, 0.25]])
    count = 200
    for prefix_size in (4, 1):
        step = draw_step_on_device(
            probs.expand(count, -1).contiguous(),
            Filters(
                top_ks=torch.full((count,), 1 << 30, dtype=torch.int32),
                top_ps=torch.full((count,), 0.8),
                min_ps=None,
            ),
            (torch.arange(count) + 0.5) / count,
            None,
            prefix_size=prefix_size,
            block=32,
        )
        found = np.bincount(step.ids_B.numpy(), minlength=5) / count
        assert np.abs(found - np.array([0, 0.4, 0.2, 0, 0.25]) / 0.85).max() < 6e-3, found


def main() -> None:
    rng = np.random.default_rng(0)
    for vocab_size, prefix_size, block in (
        (5, 8, 32),
        (40, 40, 32),
        (40, 3, 32),
        (100, 16, 64),
        (70, 1, 32),
    ):
        for exact_ties in (True, False):
            for whole in (True, False):
                check(rng, vocab_size, prefix_size, block, exact_ties=exact_ties, whole=whole)
    check_distribution()
    print("ok")


if __name__ == "__main__":
    main()
