"""The targets of rl-schedule, measured next to three plain methods written here; one core, no GPU.

Run: `OMP_NUM_THREADS=1 python benchmarks/bench_schedule.py` (all sizes, about ten minutes),
`--sizes 512 4096` for some, `--markdown` for the table of the README. Prints one row per
distribution, size and method, then whether every target is met (exit 1 if not).

Times are CPU seconds of the process, so that a shared machine does not change them much; the first
plans of the process, which load numpy's routines, are not counted. Costs are 24576 s + s^2, one
rollout per sample, one step. Pareto lengths are 300 * (1 + pareto(shape)): one in a hundred is cut
off at the cap; there the plan with the fewest micro-batches is shown as well, which no plan levels
where `rank_bound` says so.
"""

import argparse
import platform
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import numpy as np

from rl_schedule import ScheduleRequest, build_dp_schedule
from rl_schedule.study.comparison import REFERENCES, MethodFigures, measure_plan, measure_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One column of the target table."""

    samples: int
    ranks: int
    cap: int
    seeds: int
    most_seconds: float


SIZES = (
    Size(samples=512, ranks=8, cap=16384, seeds=10, most_seconds=0.04),
    Size(samples=4096, ranks=64, cap=32768, seeds=10, most_seconds=0.04),
    Size(samples=16384, ranks=128, cap=32768, seeds=10, most_seconds=0.12),
    Size(samples=131072, ranks=512, cap=32768, seeds=3, most_seconds=1.5),
    Size(samples=1_000_000, ranks=4096, cap=32768, seeds=1, most_seconds=15.0),
)
TINY = Size(samples=64, ranks=2, cap=16384, seeds=1, most_seconds=60.0)
DISTRIBUTIONS = (
    "lognormal 7.6",
    "lognormal 8.0",
    "bimodal",
    "uniform",
    "Pareto 1.05",
    "Pareto 1.1",
)
UNIFORM_CAP = 9216
MOST_RANK_IMBALANCE = 1.0015
MOST_RANK_IMBALANCE_OF_FEWEST, MOST_ABOVE_RANK_BOUND = 1.01, 0.005
MOST_SLOT_IMBALANCE, MOST_ABOVE_SLOT_BOUND = 1.03, 0.025
MOST_MEGABYTES = 2000
HEAVY_TAILS_MAY_TAKE = 1.5


def lengths_of(distribution: str, samples: int, seed: int, cap: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if distribution == "lognormal 7.6":
        values = rng.lognormal(7.6, 0.9, samples)
    elif distribution == "lognormal 8.0":
        values = rng.lognormal(8.0, 1.0, samples)
    elif distribution == "bimodal":
        values = np.where(
            rng.random(samples) < 0.2,
            rng.normal(12_000, 1_500, samples),
            rng.normal(300, 60, samples),
        )
    elif distribution == "uniform":
        values = rng.uniform(2_000, 6_000, samples)
    else:
        values = 300 * (1 + rng.pareto(float(distribution.split()[1]), samples))
    return np.clip(np.rint(values), 64, cap).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One method on one batch."""

    figures: MethodFigures
    cpu_seconds: float
    bound: int
    slot_bound: float
    rank_bound: float = 1.0


def requests_of(distribution: str, size: Size) -> Iterator[ScheduleRequest]:
    cap = UNIFORM_CAP if distribution == "uniform" else size.cap
    for seed in range(size.seeds):
        yield ScheduleRequest(
            total_lengths=lengths_of(distribution, size.samples, seed, cap),
            rollout_ids=np.arange(size.samples),
            global_batch_size=None,
            splitter="all",
            dp_size=size.ranks,
            max_tokens_per_gpu=cap,
        )


def run(method: int | str, request: ScheduleRequest) -> Run:
    if isinstance(method, int):
        started = time.process_time()
        figures = measure_reference(request, method)
        return Run(
            figures=figures, cpu_seconds=time.process_time() - started, bound=0, slot_bound=1.0
        )
    slack: float | Literal["auto"] = "auto" if method == "slack auto" else 0.0
    extra: Literal["auto", 0] = 0 if method == "fewest" else "auto"
    started = time.process_time()
    plan = build_dp_schedule(
        total_lengths=request.total_lengths,
        rollout_ids=request.rollout_ids,
        global_batch_size=None,
        splitter="all",
        dp_size=request.dp_size,
        max_tokens_per_gpu=request.max_tokens_per_gpu,
        rank_slack=slack,
        extra_micro_batches=extra,
    )
    cpu_seconds = time.process_time() - started
    name = f"rl-schedule, {method}" if method in {"fewest", "slack auto"} else "rl-schedule"
    figures = measure_plan(name, request, plan)
    return Run(
        figures=figures,
        cpu_seconds=cpu_seconds,
        bound=plan.stats.micro_batch_bound,
        slot_bound=plan.stats.slot_bound,
        rank_bound=plan.stats.rank_bound,
    )


def missed(name: str, size: Size, runs: list[Run], ffd: list[Run]) -> list[str]:
    """Say which targets a method of ours misses on one row."""
    found = []
    slack = runs[0].figures.method.endswith("auto")
    fewest = runs[0].figures.method.endswith("fewest")
    extra = 0 if slack or fewest else 1
    where = f"{runs[0].figures.method}, {name}, n={size.samples}"
    if any(r.figures.over_cap for r in runs):
        found.append(f"{where}: micro-batches over the cap")
    if any(
        r.figures.micro_batches > f.figures.micro_batches + extra
        for r, f in zip(runs, ffd, strict=True)
    ):
        found.append(f"{where}: more micro-batches than first-fit-decreasing")
    for r in [] if slack else runs:
        allowed = MOST_RANK_IMBALANCE
        if fewest:
            allowed = max(MOST_RANK_IMBALANCE_OF_FEWEST, r.rank_bound + MOST_ABOVE_RANK_BOUND)
        if r.figures.rank_imbalance > allowed:
            found.append(
                f"{where}: rank imbalance {r.figures.rank_imbalance:.4f}, allowed {allowed:.4f}"
            )
    for r in runs if slack else []:
        allowed = max(MOST_SLOT_IMBALANCE, r.slot_bound + MOST_ABOVE_SLOT_BOUND)
        if r.figures.slot_imbalance > allowed:
            found.append(
                f"{where}: slot imbalance {r.figures.slot_imbalance:.4f}, allowed {allowed:.4f}"
            )
    slowest = max(r.cpu_seconds for r in runs)
    most_seconds = size.most_seconds * (HEAVY_TAILS_MAY_TAKE if name.startswith("Pareto") else 1)
    if slowest > most_seconds:
        found.append(f"{where}: {slowest:.3f} s, allowed {most_seconds:.3f}")
    return found


def row(name: str, size: Size, runs: list[Run]) -> list[str]:
    def spread(values: list[float], digits: int) -> str:
        return f"{statistics.median(values):.{digits}f} / {max(values):.{digits}f}"

    figures = [r.figures for r in runs]
    counts = sorted({f.micro_batches for f in figures})
    bounds = sorted({r.bound for r in runs})
    slots = sorted(r.slot_bound for r in runs)
    rank_bounds = sorted(r.rank_bound for r in runs)
    ours = bounds != [0]
    return [
        name,
        f"{size.samples:,}",
        figures[0].method,
        str(sum(f.over_cap for f in figures)),
        f"{counts[0]}-{counts[-1]}" + (f" (>= {bounds[0]}-{bounds[-1]})" if ours else ""),
        spread([f.rank_imbalance for f in figures], 4)
        + (f" (>= {rank_bounds[0]:.4f}-{rank_bounds[-1]:.4f})" if rank_bounds[-1] > 1.0 else ""),
        spread([f.slot_imbalance for f in figures], 4),
        f"{slots[0]:.4f}-{slots[-1]:.4f}" if ours else "",
        spread([r.cpu_seconds * 1e3 for r in runs], 1),
    ]


HEADER = [
    "lengths",
    "samples",
    "method",
    "over cap",
    "micro-batches / rank",
    "rank max / mean",
    "slots / ideal",
    "slot bound",
    "CPU ms",
]


def write(cells: list[str], *, markdown: bool) -> None:
    widths = (14, 9, 28, 8, 22, 36, 17, 15, 17)
    sys.stdout.write(
        ("| " + " | ".join(cells) + " |\n")
        if markdown
        else "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip() + "\n"
    )
    sys.stdout.flush()


EACH_HEADER = ["lengths", "seed", "fewest", "no plan below", "ranks", "CPU ms"]
EACH_HEADER += ["auto", "ranks", "CPU ms"]


def write_each_seed(size: Size) -> None:
    """Print what is reached on each seed with the fewest micro-batches, and with one more."""
    write(EACH_HEADER, markdown=True)
    write(["---"] * len(EACH_HEADER), markdown=True)
    for name in DISTRIBUTIONS:
        for seed, request in enumerate(requests_of(name, size)):
            fewest, auto = run("fewest", request), run("level", request)
            cells = [name, str(seed), str(fewest.figures.micro_batches)]
            cells += [f"{fewest.rank_bound:.4f}", *ranks_and_time(fewest)]
            cells += [str(auto.figures.micro_batches), *ranks_and_time(auto)]
            write(cells, markdown=True)


def ranks_and_time(found: Run) -> list[str]:
    return [f"{found.figures.rank_imbalance:.4f}", f"{found.cpu_seconds * 1e3:.1f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[size.samples for size in SIZES])
    parser.add_argument("--only-ours", action="store_true", help="leave the plain methods out")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument(
        "--each-seed", action="store_true", help="ranks with and without one more, seed by seed"
    )
    parser.add_argument("--tiny", action="store_true", help="one small size; no target is checked")
    options = parser.parse_args()
    sizes = [TINY] if options.tiny else [size for size in SIZES if size.samples in options.sizes]
    for name in DISTRIBUTIONS:
        run("level", next(requests_of(name, SIZES[0])))
    if options.each_seed:
        for size in sizes:
            write_each_seed(size)
        return 0
    write(HEADER, markdown=options.markdown)
    if options.markdown:
        write(["---"] * len(HEADER), markdown=True)
    problems: list[str] = []
    for size in sizes:
        for name in DISTRIBUTIONS:
            ffd = [run(len(REFERENCES) - 1, request) for request in requests_of(name, size)]
            plain: list[int | str] = [*range(len(REFERENCES) - 1), "ffd"]
            ours = ["level", "fewest" if name.startswith("Pareto") else "slack auto"]
            for method in [*([] if options.only_ours else plain), *ours]:
                runs = (
                    ffd
                    if method == "ffd"
                    else [run(method, request) for request in requests_of(name, size)]
                )
                write(row(name, size, runs), markdown=options.markdown)
                if method in ours and not options.tiny:
                    problems += missed(name, size, runs, ffd)
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if megabytes > MOST_MEGABYTES:
        problems.append(f"{megabytes} MB resident, allowed {MOST_MEGABYTES}")
    versions = ", ".join(
        f"{package} {metadata.version(package)}" for package in ("rl-schedule", "numpy")
    )
    sys.stdout.write(
        f"\n{platform.machine()}, Python {platform.python_version()}, {versions}; at most"
        f" {megabytes} MB resident\n"
    )
    sys.stdout.write(
        "every target is met\n" if not problems else "MISSED\n" + "\n".join(problems) + "\n"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
