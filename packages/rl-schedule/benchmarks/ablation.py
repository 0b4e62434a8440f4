"""What each stage of balancing adds: plans with all stages but one, against plans with all.

Run: `OMP_NUM_THREADS=1 python benchmarks/ablation.py` (minutes), `--samples 512` for another size
of `bench_schedule.py` or `--samples 10` for steps of ten samples on two ranks. Prints a Markdown
table: for each stage left out, how much higher max / mean over the ranks is on average over the
seeds (in percentage points), by how much the slots are, and the CPU time of a plan. Negative
figures: the plan is better without the stage.

The first row has the figures with all stages. `extra_micro_batches` is 0 but in the last row, so
that the repairs show.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from bench_schedule import DISTRIBUTIONS, SIZES, UNIFORM_CAP, Size, lengths_of

from rl_schedule import build_dp_schedule
from rl_schedule.balancing import pack_long_first, portfolio

SMALL = Size(samples=10, ranks=2, cap=32768, seeds=20, most_seconds=1.0)
TINY = Size(samples=64, ranks=2, cap=16384, seeds=1, most_seconds=60.0)
SEEDS = 8


def nothing(*_: Any, **__: Any) -> tuple[()]:
    return ()


def no_bins(*_: Any, **__: Any) -> None:
    return None


def as_they_are(bin_of: Any, *_: Any, **__: Any) -> Any:
    return bin_of


STAGES: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "targets set anew after the long samples": ((portfolio, "_RETARGET_MOST", 0),),
    "long samples fitted first": ((portfolio, "pack_long_first", no_bins),),
    "... samples above cap / 16, where cap / 6 fails": ((portfolio, "_LONG_SHARES", (6,)),),
    "... under the least cap that works": ((pack_long_first, "_CAP_SEARCH_STEPS", 0),),
    "... shared with empty bins": ((pack_long_first, "_SPREAD_OVER", ()),),
    "... swaps between bins": ((pack_long_first, "level_bins", as_they_are),),
    "... also where the greedy pass fits": ((portfolio, "_SLOT_GAP", 9.0),),
    "squares first": ((portfolio, "_by_squares", nothing),),
    "exchange between ranks": ((portfolio, "_by_exchange", nothing),),
    "search of tiny steps": ((portfolio, "_by_search", nothing),),
    "first-fit-decreasing dealt in turn (P10)": ((portfolio, "_by_strides", nothing),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Means over the seeds of one distribution."""

    rank: float
    slots: float
    cpu_ms: float


def figures(name: str, size: Size, seeds: int, extra: Literal["auto", 0]) -> Figures:
    cap = UNIFORM_CAP if name == "uniform" else size.cap
    rows = []
    for seed in range(seeds):
        lengths = lengths_of(name, size.samples, seed, cap)
        started = time.process_time()
        plan = build_dp_schedule(
            total_lengths=lengths,
            rollout_ids=np.arange(size.samples),
            global_batch_size=None,
            splitter="all",
            dp_size=size.ranks,
            max_tokens_per_gpu=cap,
            extra_micro_batches=extra,
        )
        cpu_ms = (time.process_time() - started) * 1e3
        rows.append((plan.stats.rank_imbalance, plan.stats.slot_imbalance, cpu_ms))
    rank, slots, cpu = (statistics.mean(column) for column in zip(*rows, strict=True))
    return Figures(rank=rank, slots=slots, cpu_ms=cpu)


def without(stage: str, size: Size, seeds: int) -> list[Figures]:
    changes = STAGES[stage]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        return [figures(name, size, seeds, 0) for name in DISTRIBUTIONS]
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)


def write(cells: list[str]) -> None:
    sys.stdout.write("| " + " | ".join(cells) + " |\n")
    sys.stdout.flush()


def difference(value: float) -> str:
    # Without the sign of a zero.
    return f"{round(100 * value, 2) + 0.0:+.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tiny", action="store_true", help="one small size, one seed")
    options = parser.parse_args()
    sizes = {size.samples: size for size in (*SIZES, SMALL)}
    size = TINY if options.tiny else sizes[options.samples]
    seeds = 1 if options.tiny else max(SEEDS, size.seeds if size is SMALL else 0)
    for name in DISTRIBUTIONS:
        figures(name, TINY, 1, 0)
    write(["without", *DISTRIBUTIONS])
    write(["---"] * (1 + len(DISTRIBUTIONS)))
    base = [figures(name, size, seeds, 0) for name in DISTRIBUTIONS]
    write(["nothing", *(f"{b.rank:.4f}, {b.slots:.4f}, {b.cpu_ms:.1f} ms" for b in base)])
    rows = {stage: without(stage, size, seeds) for stage in STAGES}
    grown = [figures(name, size, seeds, "auto") for name in DISTRIBUTIONS]
    for stage, row in rows.items():
        write([stage, *(cell(r, b) for r, b in zip(row, base, strict=True))])
    write(
        [
            "*with* one more micro-batch where it levels",
            *(cell(r, b) for r, b in zip(grown, base, strict=True)),
        ]
    )
    return 0


def cell(row: Figures, base: Figures) -> str:
    return (
        f"{difference(row.rank - base.rank)}, {difference(row.slots - base.slots)},"
        f" {row.cpu_ms:.1f} ms"
    )


if __name__ == "__main__":
    raise SystemExit(main())
