"""The output layer without logits on one GPU: correct against float64, then timed.

    python packages/rl-topp/benchmarks/gpu_lm_head.py [check] [tune] [stages] [sizes] [shards] [table]     (default: all but tune)

`check` random shapes against float64; `table` the two shapes of the specification against full
logits with a mask; `sizes` mean set sizes 1 to 1,024, dot products against blocks, with the fitted
constants of `rl_topp.lm_head.cost`; `shards` one of 1, 2 or 8 vocabulary shards; `stages` each
kernel alone, with the bandwidth it reaches beside a copy's; `tune` other tile sizes. Times are
medians between CUDA events after warm-up, forward + backward, bfloat16. Needs torch, triton and
numpy; with OUT set, all figures go to $OUT/gpu_lm_head.json. The short table comes last.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from lm_head_cases import VOCAB_SIZE, exact, operands, random_rows, relative, targets_in, zipf_rows

from rl_topp import NucleusSet, triton_kernels
from rl_topp.lm_head import cost, nucleus_lm_head_log_probs
from rl_topp.torch.upload import UploadedRows, upload_rows

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


def errors(
    rows: NucleusSet, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, method: str
) -> tuple[float, ...]:
    """Return the largest log-prob error, the relative norms of both gradients' errors, and those of
    the exact gradients rounded to the dtype.

    Two runs must agree bit for bit.
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


# Timing
# ----------------------------------------------------------------------------------------------------------------------------


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
    """Median time until everything is handed to an idle device."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(times)


def peak_gib(call: Callable[[], Any], *operands: torch.Tensor) -> float:
    """Return the most memory that a call takes beyond what is allocated before it; gradients of `operands` that an earlier call left do not count."""
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


def fit_costs(
    entries: Any, seconds: dict[str, Any], fewer_rows_seconds: float, num_rows: int, width: int
) -> None:
    """Print the constants of `rl_topp.lm_head.cost` that the sizes give: slopes where entries dominate, and two row counts of blocks."""
    elements = VOCAB_SIZE * width
    product = (seconds["blocked"][1] - fewer_rows_seconds) / ((num_rows - 512) * elements)
    fitted = cost.DeviceCost(
        entry_seconds=float(np.polyfit(entries[3:], seconds["sparse"][3:], 1)[0]) / width,
        product_seconds=float(product),
        pass_seconds=float(fewer_rows_seconds / elements - 512 * product),
        block_entry_seconds=max(0.0, float(np.polyfit(entries[3:], seconds["blocked"][3:], 1)[0])),
    )
    even, used = (
        each.even_size(num_local_ids=VOCAB_SIZE, width=width)
        for each in (fitted, cost.COSTS["cuda"])
    )
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


class Stages:
    """The kernels one by one at the large shape, and the bytes each must move at least (every array once)."""

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        num_rows, vocab_size, width = SHAPES["large"]
        self.rows = zipf_rows(rng, num_rows, 5.0)
        self.hidden, self.weight = (
            operand.detach() for operand in operands(num_rows, vocab_size, width)
        )
        self.targets = targets_in(self.rows, rng)
        self.lists = self.upload()
        self.ids_E, self.rows_E = self.list_entries()
        self.z_E = self.scores(triton_kernels.KernelShapes())
        self.row = torch.randn(num_rows, device=DEVICE)
        self.coefficients_E = torch.randn(self.ids_E.numel(), device=DEVICE) * (self.ids_E >= 0)
        self.statistics_4T = torch.zeros(4, num_rows, device=DEVICE)
        self.for_hidden, self.for_weight = (
            torch.zeros_like(self.hidden),
            torch.zeros_like(self.weight),
        )
        used, hidden_bytes = (
            float(torch.unique(self.ids_E).numel()) * width * 2,
            float(self.hidden.numel()) * 2,
        )
        self.least = {
            "scores": used + hidden_bytes,
            "d_hidden": used + 2 * hidden_bytes,
            "d_weight": 2 * used + hidden_bytes,
        }
        self.least["zero d_weight"] = float(self.weight.numel()) * 2

    def upload(self) -> UploadedRows:
        return upload_rows(self.rows, np.arange(len(self.rows)), DEVICE)

    def list_entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        return triton_kernels.list_entries(
            self.lists, self.targets, vocab_start=0, num_local_ids=self.weight.shape[0]
        )

    def scores(self, shapes: triton_kernels.KernelShapes) -> torch.Tensor:
        return triton_kernels.entry_scores(
            self.hidden, self.weight, self.ids_E, self.rows_E, dtype=torch.float32, shapes=shapes
        )

    def row_statistics(self) -> None:
        triton_kernels.row_statistics(
            self.z_E, self.lists.rows_R, self.lists.offsets_R1, self.statistics_4T
        )

    def coefficients(self) -> None:
        triton_kernels.entry_coefficients(
            self.z_E,
            self.ids_E,
            self.lists.rows_R,
            self.lists.offsets_R1,
            self.row,
            None,
            self.row,
            self.row,
        )

    def d_hidden(self, shapes: triton_kernels.KernelShapes) -> None:
        lists = self.ids_E, self.coefficients_E, self.lists.rows_R, self.lists.offsets_R1
        triton_kernels.hidden_gradient(self.weight, *lists, self.for_hidden, shapes=shapes)

    def d_weight(self, shapes: triton_kernels.KernelShapes) -> None:
        triton_kernels.weight_gradient(
            self.hidden,
            self.ids_E,
            self.rows_E,
            self.coefficients_E,
            self.for_weight,
            shapes=shapes,
        )

    def calls(self, shapes: triton_kernels.KernelShapes) -> dict[str, Callable[[], Any]]:
        return {
            "upload": self.upload,
            "list entries": self.list_entries,
            "scores": lambda: self.scores(shapes),
            "row statistics": self.row_statistics,
            "coefficients": self.coefficients,
            "d_hidden": lambda: self.d_hidden(shapes),
            "zero d_weight": lambda: torch.zeros_like(self.weight),
            "sort": lambda: torch.sort(self.ids_E, stable=True),
            "d_weight": lambda: self.d_weight(shapes),
        }


def copy_rate() -> float:
    """Return bytes read and written per second by a large device-to-device copy."""
    source = torch.randn(2**30, device=DEVICE)
    target = torch.empty_like(source)
    return 8 * 2**30 / (1e-3 * milliseconds(lambda: target.copy_(source)))


def stages() -> None:
    say(f"copy: {copy_rate() / 1e12:.2f} TB/s read + written", short=True)
    found = Stages()
    for name, call in found.calls(triton_kernels.KernelShapes()).items():
        took = milliseconds(call)
        rate = (
            f", {found.least[name] / took / 1e9:.2f} TB/s of the least traffic"
            if name in found.least
            else ""
        )
        say(f"  {name:15s} {took:7.3f} ms{rate}", short=True)
        FIGURES[f"stage {name}"] = took


def tune() -> None:
    grid: list[tuple[str, dict[str, int]]] = []
    grid += [
        ("scores", {"score_entries": e, "score_block": b})
        for e in (2, 4, 8)
        for b in (128, 256, 512)
    ]
    grid += [
        ("d_hidden", {"hidden_entries": e, "hidden_block": b})
        for e in (1, 2, 4)
        for b in (512, 1024, 2048)
    ]
    grid += [
        ("d_weight", {"weight_entries": e, "weight_block": b, "weight_span": s, "chunk": 64})
        for e in (1, 2, 4)
        for b in (512, 1024, 2048)
        for s in (1, 4, 16)
    ]
    found = Stages()
    results = [
        (name, milliseconds(found.calls(triton_kernels.KernelShapes(**change))[name], 9, 2), change)
        for name, change in grid
    ]
    FIGURES["tune"] = results
    for stage in ("scores", "d_hidden", "d_weight"):
        for name, took, change in sorted(
            (result for result in results if result[0] == stage), key=lambda result: result[1]
        )[:3]:
            say(f"  tune {name}: {took:.3f} ms with {change}", short=True)


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
