"""The output layer without logits on one GPU: correct against float64, then timed.

    python packages/rl-topp/benchmarks/gpu_lm_head.py [NAME ...]

The names are check, tune, stages, sizes, shards and table; all but `tune` by default.

`check` random shapes against float64; `table` the two shapes of the specification against full
logits with a mask; `sizes` mean set sizes 1 to 1,024, dot products against blocks, with the fitted
constants of `rl_topp.lm_head.cost`; `shards` one of 1, 2 or 8 vocabulary shards; `stages` each
kernel alone, with the bandwidth it reaches beside a copy's; `tune` other tile sizes. Times are
medians between CUDA events after warm-up, forward + backward, bfloat16. Needs torch, triton and
numpy; with OUT set, all figures go to $OUT/gpu_lm_head.json. The short table comes last.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from gpu_lm_head_stages import stages, tune
from gpu_lm_head_timing import (
    DEVICE,
    FIGURES,
    LINES,
    SHAPES,
    SHORT,
    head_call,
    host_milliseconds,
    mask_of,
    masked_call,
    milliseconds,
    peak_gib,
    say,
    unmasked_call,
)
from lm_head_cases import VOCAB_SIZE, exact, operands, random_rows, relative, targets_in, zipf_rows

from rl_topp import NucleusSet
from rl_topp.lm_head import cost, nucleus_lm_head_log_probs


def errors(
    rows: NucleusSet, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, method: str
) -> tuple[float, ...]:
    """Return how far a method is from float64.

    The largest log-prob error, the relative norms of both gradients' errors, and those of the exact
    gradients rounded to the dtype. Two runs must agree bit for bit.
    """
    upstream = torch.randn(len(rows), device=DEVICE)
    runs = []
    for _ in range(2):
        hidden.grad = weight.grad = None
        poison = torch.full(
            (2**26,), torch.nan, device=DEVICE
        )  # freed memory holds NaN, so an element nobody writes shows
        del poison
        scores = nucleus_lm_head_log_probs(hidden, weight, targets, rows, method=method)  # type: ignore[arg-type]
        (scores.log_probs * upstream).sum().backward()  # type: ignore[no-untyped-call]
        runs.append((scores.log_probs.detach(), hidden.grad, weight.grad))
    assert all(torch.equal(left, right) for left, right in zip(*runs, strict=True)), (
        "two runs differ"
    )
    log_probs, for_hidden, for_weight = exact(hidden, weight, targets, rows, upstream)
    found = [relative(runs[0][1], for_hidden), relative(runs[0][2], for_weight)]
    best = [relative(wanted.to(hidden.dtype), wanted) for wanted in (for_hidden, for_weight)]
    hidden.grad = weight.grad = None
    return float((runs[0][0].double() - log_probs).abs().max()), *found, *best


def check() -> None:
    rng = np.random.default_rng(time.time_ns())
    cases = [
        (1, 7, 5, 7),
        (3, 1_000, 33, 1_000),
        (257, 50_000, 1_000, 9),
        (1_000, 4_096, 3_583, 64),
        (777, 32_001, 256, 32_001),
        (5_000, VOCAB_SIZE, 896, 40),
        (20_000, 20_011, 640, 12),
    ]
    worst: dict[str, float] = {}
    for num_rows, vocab_size, width, largest in cases:
        rows = random_rows(rng, num_rows, vocab_size, largest)
        for dtype, limits in ((torch.bfloat16, (2e-3, 3e-3)), (torch.float32, (1e-4, 1e-5))):
            hidden, weight = operands(num_rows, vocab_size + 13, width, dtype)
            targets = torch.from_numpy(rng.integers(0, vocab_size, num_rows)).to(DEVICE)
            for method in ("sparse", "blocked", "auto"):
                found = errors(rows, hidden, weight, targets, method)
                # The norm of a gradient of a few numbers may lie in one that rounding alone moves
                # by 2**-8.
                gradients_good = all(
                    error <= max(limits[1], 1.05 * best)
                    for error, best in zip(found[1:3], found[3:], strict=True)
                )
                good = found[0] <= limits[0] and gradients_good
                key = f"{method} {dtype}"
                worst[key] = max(worst.get(key, 0.0), found[1], found[2])
                if not good:
                    say(
                        f"WRONG {method} {dtype} T={num_rows} V={vocab_size} H={width}"
                        f" largest={largest}: {found}"
                    )
    say(
        "check: worst relative gradient error "
        + ", ".join(f"{key} {value:.1e}" for key, value in worst.items()),
        short=True,
    )
    FIGURES["check"] = worst


def table() -> None:
    rng = np.random.default_rng(1)
    for name, (num_rows, vocab_size, width) in SHAPES.items():
        rows = zipf_rows(rng, num_rows, 5.0)
        hidden, weight = operands(num_rows, vocab_size, width)
        targets = targets_in(rows, rng)
        found = errors(rows, hidden, weight, targets, "sparse")
        sparse = head_call(hidden, weight, targets, rows, method="sparse")
        times = sorted(milliseconds(sparse) for _ in range(2))
        forward = milliseconds(
            head_call(hidden, weight, targets, rows, backward=False, method="sparse")
        )
        hosts = [
            host_milliseconds(
                head_call(hidden, weight, targets, rows, backward=both, method="sparse")
            )
            for both in (False, True)
        ]
        memory = peak_gib(sparse, hidden, weight)
        unfiltered = NucleusSet.unfiltered(num_rows, vocab_size=vocab_size)
        dense = head_call(hidden, weight, targets, unfiltered)
        dense_time, dense_memory = milliseconds(dense, 5, 2), peak_gib(dense, hidden, weight)
        mask = mask_of(rows)
        masked = masked_call(hidden, weight, targets, mask)
        masked_time, masked_memory = milliseconds(masked, 5, 2), peak_gib(masked, hidden, weight)
        plain_time, plain_memory = (
            milliseconds(unmasked_call(hidden, weight, targets), 5, 2),
            peak_gib(unmasked_call(hidden, weight, targets), hidden, weight),
        )
        hidden.grad = weight.grad = None
        del mask
        singletons = (rows.set_sizes == 1).mean()
        table_lines = [
            (
                f"T={num_rows} V={vocab_size} H={width}, mean kept {rows.ids.size / num_rows:.2f},"
                f" singletons {singletons:.2f}"
            ),
            f"  masked full logits {masked_time:8.2f} ms {masked_memory:6.2f} GiB",
            f"  cross-entropy      {plain_time:8.2f} ms {plain_memory:6.2f} GiB (no mask)",
            f"  no filter, blocks  {dense_time:8.2f} ms {dense_memory:6.2f} GiB",
            (
                f"  kept ids only      {times[0]:8.2f} ms {memory:6.2f} GiB (again {times[1]:.2f};"
                f" forward {forward:.2f}; host {hosts[0]:.2f} and {hosts[1]:.2f})"
            ),
            (
                f"  -> {masked_time / times[1]:.1f}x faster, {masked_memory / memory:.1f}x less; "
                f"errors: log-prob {found[0]:.1e}, gradients {found[1]:.1e} {found[2]:.1e}"
            ),
        ]
        for line in table_lines:
            say(line, short=True)
        FIGURES[f"host {name}"] = hosts
        FIGURES[f"table {name}"] = {
            "masked": masked_time,
            "plain": plain_time,
            "dense": dense_time,
            "sparse": times,
            "forward": forward,
        }
        FIGURES[f"memory {name}"] = {
            "masked": masked_memory,
            "plain": plain_memory,
            "dense": dense_memory,
            "sparse": memory,
        }


def sizes() -> None:
    rng = np.random.default_rng(2)
    num_rows, width = 2_048, 3_584
    hidden, weight = operands(num_rows, VOCAB_SIZE, width)
    entries: list[int] = []
    times: dict[str, list[float]] = {"sparse": [], "blocked": [], "auto": []}
    for mean in (1, 5, 16, 64, 256, 1024):
        rows = zipf_rows(rng, num_rows, float(mean))
        targets = targets_in(rows, rng)
        for method, found in times.items():
            found.append(
                milliseconds(head_call(hidden, weight, targets, rows, method=method), 7, 2)
            )
        memory = peak_gib(head_call(hidden, weight, targets, rows, method="sparse"), hidden, weight)
        entries.append(rows.ids.size)
        sparse_time, blocked_time, auto_time = (found[-1] for found in times.values())
        say(
            f"mean kept {rows.ids.size / num_rows:7.1f}: dot products {sparse_time:7.2f} ms"
            f" ({memory:.2f} GiB), blocks {blocked_time:7.2f}, auto {auto_time:7.2f}"
            f" ({100 * (auto_time / min(sparse_time, blocked_time) - 1):+.0f} % of the better)",
            short=True,
        )
    FIGURES["sizes"] = {"entries": entries, **times}
    hidden, weight = operands(512, VOCAB_SIZE, width)
    rows = zipf_rows(rng, 512, 5.0)
    fewer = milliseconds(
        head_call(hidden, weight, targets_in(rows, rng), rows, method="blocked"), 7, 2
    )
    fit_costs(
        np.array(entries),
        {method: 1e-3 * np.array(found) for method, found in times.items()},
        1e-3 * fewer,
        num_rows,
        width,
    )


def even_size(costs: cost.DeviceCost, width: int) -> float:
    """Return the ids per row from which on blocks cost a row less, once they run at all."""
    per_entry = costs.entry_seconds * width - costs.block_entry_seconds
    return VOCAB_SIZE * costs.product_seconds * width / per_entry if per_entry > 0 else float("inf")


def fit_costs(
    entries: Any, seconds: dict[str, Any], fewer_rows_seconds: float, num_rows: int, width: int
) -> None:
    """Print the constants of `rl_topp.lm_head.cost` that the sizes give.

    They are slopes where entries dominate, and two row counts of blocks.
    """
    elements = VOCAB_SIZE * width
    product = (seconds["blocked"][1] - fewer_rows_seconds) / ((num_rows - 512) * elements)
    fitted = cost.DeviceCost(
        entry_seconds=float(np.polyfit(entries[3:], seconds["sparse"][3:], 1)[0]) / width,
        product_seconds=float(product),
        pass_seconds=float(fewer_rows_seconds / elements - 512 * product),
        block_entry_seconds=max(0.0, float(np.polyfit(entries[3:], seconds["blocked"][3:], 1)[0])),
    )
    even, used = (even_size(each, width) for each in (fitted, cost.COSTS["cuda"]))
    values = ", ".join(f"{name}={getattr(fitted, name):.3g}" for name in type(fitted).__slots__)
    say(
        f"fitted: DeviceCost({values}); even at {even:.0f} ids per row (built in: {used:.0f})",
        short=True,
    )
    FIGURES["constants"] = {name: getattr(fitted, name) for name in type(fitted).__slots__}


def shards() -> None:
    rng = np.random.default_rng(3)
    num_rows, vocab_size, width = SHAPES["large"]
    rows = zipf_rows(rng, num_rows, 5.0)
    targets = targets_in(rows, rng)
    # One process stands for the rank of that shard; its group has no one to reduce with, so what
    # the others would send is not in the times.
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        alone: dict[str, Any] = {
            "method": "sparse",
            "tp_group": dist.group.WORLD,
            "hidden_gradient": "partial",
        }
        for count in (1, 2, 8):
            hidden, weight = operands(num_rows, vocab_size // count, width)
            middle = (count // 2) * (vocab_size // count)
            busy = milliseconds(head_call(hidden, weight, targets, rows, vocab_start=0, **alone))
            quiet = milliseconds(
                head_call(hidden, weight, targets, rows, vocab_start=middle, **alone)
            )
            memory = peak_gib(head_call(hidden, weight, targets, rows, **alone), hidden, weight)
            say(
                f"1 of {count} shards: first (common ids) {busy:.2f} ms, middle {quiet:.2f} ms,"
                f" {memory:.2f} GiB",
                short=True,
            )
            FIGURES[f"shards {count}"] = [busy, quiet, memory]
        dist.destroy_process_group()


def main() -> None:
    torch.manual_seed(0)
    wanted = sys.argv[1:] or ["check", "stages", "sizes", "shards", "table"]
    properties = torch.cuda.get_device_properties(0)
    say(f"{properties.name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    for name in wanted:
        begin = time.perf_counter()
        {
            "check": check,
            "table": table,
            "sizes": sizes,
            "shards": shards,
            "stages": stages,
            "tune": tune,
        }[name]()
        print(f"[{name}: {time.perf_counter() - begin:.0f} s]", flush=True)
        torch.cuda.empty_cache()
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "gpu_lm_head.json").write_text(
            json.dumps({"lines": LINES, "figures": FIGURES}, indent=1)
        )
    print("\n" + "\n".join(SHORT))
    if any(line.startswith("WRONG") for line in LINES):
        sys.exit(1)


if __name__ == "__main__":
    main()
