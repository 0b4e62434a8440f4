"""What an entry and a block cost on one CPU core: `cpu` of `rl_topp.lm_head.cost`.

    OMP_NUM_THREADS=1 python packages/rl-topp/benchmarks/cpu_lm_head.py

Prints forward + backward times (float32, medians), the fitted constants, and where dot products and
blocks cost the same.
"""

import argparse
import statistics
import time
from typing import Literal

import numpy as np
import torch

from rl_topp import NucleusSet
from rl_topp.lm_head import nucleus_lm_head_log_probs

WIDTH, VOCAB_SIZE, REPEATS = 256, 32_000, 5
Method = Literal["sparse", "blocked"]


def seconds(num_rows: int, vocab_size: int, set_size: int, method: Method, *, width: int) -> float:
    rng = np.random.default_rng(0)
    rows = NucleusSet.from_lists(
        [rng.choice(vocab_size, set_size, replace=False) for _ in range(num_rows)],
        vocab_size=vocab_size,
    )
    hidden = torch.randn(num_rows, width, requires_grad=True)
    weight = torch.randn(vocab_size, width, requires_grad=True)
    targets = torch.from_numpy(rows.ids[rows.offsets[:-1]].astype(np.int64))
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        nucleus_lm_head_log_probs(
            hidden, weight, targets, rows, method=method
        ).log_probs.sum().backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="hidden size 8, 500 ids")
    tiny = parser.parse_args().tiny
    torch.set_num_threads(1)
    width, vocab_size = (8, 500) if tiny else (WIDTH, VOCAB_SIZE)

    def time_of(num_rows: int, set_size: int, method: Method) -> float:
        return seconds(num_rows, vocab_size, set_size, method, width=width)

    few, many = (time_of(1024, size, "sparse") for size in (4, 36))
    entry = (many - few) / (1024 * 32 * width)
    small, large = (time_of(count, 4, "blocked") for count in (64, 320))
    product = (large - small) / (256 * vocab_size * width)
    whole = small / (vocab_size * width) - 64 * product
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
        f" {vocab_size * product / entry:.0f} of {vocab_size:,} ids,"
        f" {128 * product / entry:.1f} of 128"
    )


if __name__ == "__main__":
    main()
