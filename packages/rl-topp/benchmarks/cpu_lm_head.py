"""What an entry and a block cost on one CPU core: the constants of `rl_topp.lm_head.cost` for
`cpu`.

    OMP_NUM_THREADS=1 python packages/rl-topp/benchmarks/cpu_lm_head.py

Prints forward + backward times (float32, medians), the fitted constants, and where dot products and
blocks cost the same.
"""

import statistics
import time

import numpy as np
import torch

from rl_topp import NucleusSet
from rl_topp.lm_head import nucleus_lm_head_log_probs

WIDTH, REPEATS = 256, 5


def seconds(num_rows: int, vocab_size: int, set_size: int, method: str) -> float:
    rng = np.random.default_rng(0)
    rows = NucleusSet.from_lists(
        [rng.choice(vocab_size, set_size, replace=False) for _ in range(num_rows)],
        vocab_size=vocab_size,
    )
    hidden = torch.randn(num_rows, WIDTH, requires_grad=True)
    weight = torch.randn(vocab_size, WIDTH, requires_grad=True)
    targets = torch.from_numpy(rows.ids[rows.offsets[:-1]].astype(np.int64))
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        nucleus_lm_head_log_probs(
            hidden, weight, targets, rows, method=method
        ).log_probs.sum().backward()  # type: ignore[arg-type, no-untyped-call]
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    torch.set_num_threads(1)
    few, many = (seconds(1024, 32_000, size, "sparse") for size in (4, 36))
    entry = (many - few) / (1024 * 32 * WIDTH)
    small, large = (seconds(count, 32_000, 4, "blocked") for count in (64, 320))
    product = (large - small) / (256 * 32_000 * WIDTH)
    whole = small / (32_000 * WIDTH) - 64 * product
    print(
        f"dot products: 1,024 rows x 4 ids {1e3 * few:.1f} ms, x 36 ids {1e3 * many:.1f} ms ->"
        f" entry_seconds {entry:.2e}"
    )
    print(
        f"blocks: 64 rows {1e3 * small:.1f} ms, 320 rows {1e3 * large:.1f} ms -> product_seconds"
        f" {product:.2e}, pass_seconds {whole:.2e}"
    )
    print(
        f"equal cost per row at {product / entry:.4f} of the vocabulary:"
        f" {32_000 * product / entry:.0f} of 32,000 ids, {128 * product / entry:.1f} of 128"
    )


if __name__ == "__main__":
    main()
