"""Plans turned into simulated step time, next to how others pack and deal.

Run: `OMP_NUM_THREADS=1 python benchmarks/step_time.py` (minutes: differencing thousands of samples
into hundreds of sets is slow), `--lengths FILE` for recorded lengths instead of drawn ones (CSV,
JSON lines or a Parquet rollout dump; `--ranks`, `--cap`). Prints Markdown: the time of a step over
that of one without bubbles and waits, mean over the seeds, for

- one stage and one synchronisation at the end of the step (data-parallel barrier),
- 4 pipeline stages under 1F1B and the same barrier,
- a synchronisation after every micro-batch, without pipeline (sharded parameters).

Costs are 24576 s + s^2, a backward pass costs twice a forward pass; transfers, launches and the
memory that a micro-batch over the cap would need are not in it. A plan over the cap is out of
memory on a cap chosen to fit: "over cap" counts such micro-batches and names the largest.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench_schedule import UNIFORM_CAP, lengths_of
from peer_orders import ORDERS, Array, Layout

from rl_schedule.study.batch_file import read_batch
from rl_schedule.study.simulation import BACKWARD_OVER_FORWARD, pipeline_seconds

STAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Steps with one name, one cluster and several seeds."""

    name: str
    ranks: int
    cap: int
    steps: list[Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One step under one order."""

    barrier: float
    pipeline: float
    lockstep: float
    micro_batches: int
    over_cap: int
    largest: float


def drawn(name: str, samples: int, ranks: int, cap: int, seeds: int) -> Case:
    cap = UNIFORM_CAP if name == "uniform" else cap
    steps = [lengths_of(name, samples, seed, cap) for seed in range(seeds)]
    return Case(name=f"{name}, {samples:,} on {ranks}", ranks=ranks, cap=cap, steps=steps)


def timing(layout: Layout, lengths: Array, costs: Array, cap: int) -> Timing:
    cost_DM = np.array([[costs[one].sum() for one in rank] for rank in layout], dtype=np.float64)
    tokens = np.array([[lengths[one].sum() for one in rank] for rank in layout])
    samples = np.array([[len(one) for one in rank] for rank in layout])
    assert samples.sum() == lengths.size
    busy = 1.0 + BACKWARD_OVER_FORWARD
    ideal = cost_DM.sum() / len(layout) * busy
    stages = pipeline_seconds(cost_DM / STAGES, pp_size=STAGES)
    return Timing(
        barrier=float(cost_DM.sum(axis=1).max()) * busy / ideal,
        pipeline=float(stages.max()) * STAGES / ideal,
        lockstep=float(cost_DM.max(axis=0).sum()) * busy / ideal,
        micro_batches=cost_DM.shape[1],
        over_cap=int(((tokens > cap) & (samples > 1)).sum()),
        largest=float(tokens.max()) / cap,
    )


def write(cells: list[str]) -> None:
    sys.stdout.write("| " + " | ".join(cells) + " |\n")
    sys.stdout.flush()


def mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f}"


def measure(case: Case) -> None:
    for name, order in ORDERS.items():
        found = []
        for lengths in case.steps:
            costs = 24576 * lengths + lengths**2
            layout = order(lengths, costs, case.cap, case.ranks)
            found.append(timing(layout, lengths, costs, case.cap))
        over = sum(step.over_cap for step in found)
        counts = sorted({step.micro_batches for step in found})
        write(
            [
                case.name,
                name,
                "-".join(map(str, dict.fromkeys((counts[0], counts[-1])))),
                f"{over}, {max(step.largest for step in found):.2f} of the cap" if over else "0",
                mean([step.barrier for step in found]),
                mean([step.pipeline for step in found]),
                mean([step.lockstep for step in found]),
            ]
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=Path, help="recorded lengths, one step")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cap", type=int, default=16384)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="64 samples on 2 ranks")
    options = parser.parse_args()
    names = ("lognormal 7.6", "lognormal 8.0", "bimodal", "Pareto 1.05", "Pareto 1.1")
    if options.lengths is not None:
        recorded = np.array(read_batch(options.lengths).total_lengths)
        name = f"{options.lengths.name}, {recorded.size:,} on {options.ranks}"
        cases = [Case(name=name, ranks=options.ranks, cap=options.cap, steps=[recorded])]
    elif options.tiny:
        cases = [drawn(name, 64, 2, 16384, 1) for name in names]
    else:
        sizes = ((512, 8, 16384), (4096, 64, 32768))
        cases = [drawn(name, *size, options.seeds) for size in sizes for name in names]
    header = ["lengths, ranks", "order", "micro-batches", "over cap"]
    header += ["step, 1 stage", f"step, {STAGES} stages", "step, in lockstep"]
    write(header)
    write(["---"] * len(header))
    for case in cases:
        measure(case)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
