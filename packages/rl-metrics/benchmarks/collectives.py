"""Metrics over ranks: two packed all-reduces against pickled dictionaries, over gloo on this
machine.

    python benchmarks/collectives.py                    # 4 processes, 10 / 100 / 1,000 metrics

`gather_object` collects (sum, count) dictionaries on rank 0 and averages there, as is usual
elsewhere, `all_gather_object` on every rank; neither checks keys. `all_reduce_metrics` checks keys
and gives everybody the result; with `dst` only one rank. Wall times are medians over repeats of the
slowest rank, after a barrier, and depend on how busy the machine is; CPU times are medians of the
rank that needs most; bytes are what one rank hands to the collectives.
"""

import argparse
import json
import pickle
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rl_metrics import Metric
from rl_metrics.metric import wire
from rl_metrics.selftest.processes import run_gloo_ranks
from rl_metrics.torch import all_reduce_metrics

Log = dict[str, tuple[float, float]]
Times = dict[tuple[int, str], list[tuple[float, float]]]


def gather_dictionaries(log: Log, size: int) -> dict[str, float] | None:
    """The usual way: pickle, gather on rank 0, average there."""
    gathered: list[Any] | None = [None] * size if dist.get_rank() == 0 else None
    dist.gather_object(log, gathered, dst=0)
    if gathered is None:
        return None
    return {
        name: sum(part[name][0] for part in gathered) / sum(part[name][1] for part in gathered)
        for name in log
    }


def all_gather_dictionaries(log: Log, size: int) -> dict[str, float]:
    """The usual way when every rank needs the result."""
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, log)
    return {
        name: sum(part[name][0] for part in gathered) / sum(part[name][1] for part in gathered)
        for name in log
    }


def timed(function: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Wall and CPU seconds of each call, every one after a barrier."""
    seconds = []
    for _ in range(repeats + 3):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    return seconds[3:]


def work(rank: int, size: int, counts: list[int], repeats: int) -> Times:
    """Times of one rank: (number of metrics, way) -> seconds of each repeat."""
    times: Times = {}
    for n in counts:
        metrics = [Metric.of_mean(f"rollout/metric_{i}", rank + i, 1 + i) for i in range(n)]
        log = {metric.name: (metric.numerator, metric.weight) for metric in metrics}
        expected = gather_dictionaries(log, size)
        ours = {name: metric.value for name, metric in all_reduce_metrics(metrics).items()}
        assert expected is None or all(
            abs((ours[name] or 0.0) - value) <= 1e-9 * abs(value)
            for name, value in expected.items()
        )
        times[n, "gather_object"] = timed(partial(gather_dictionaries, log, size), repeats)
        times[n, "all_gather_object"] = timed(partial(all_gather_dictionaries, log, size), repeats)
        times[n, "all_reduce_metrics"] = timed(partial(all_reduce_metrics, metrics), repeats)
        times[n, "all_reduce_metrics dst=0"] = timed(
            partial(all_reduce_metrics, metrics, dst=0), repeats
        )
    return times


def sent_bytes(n: int, way: str) -> int:
    """What one rank hands over."""
    if way.endswith("gather_object"):
        return len(pickle.dumps({f"rollout/metric_{i}": (float(i), 1.0 + i) for i in range(n)}))
    return 8 * (wire.HEAD_SIZE + 2 * n)


def measure(n: int, processes: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Rows of one number of metrics."""
    ranks = run_gloo_ranks(
        lambda rank, size: work(rank, size, [n], repeats), processes, deadline_seconds=600
    )
    for _, way in ranks[0]:
        wall = [
            max(seconds for seconds, _ in repeat)
            for repeat in zip(*(times[n, way] for times in ranks), strict=True)
        ]
        cpu = max(statistics.median(seconds for _, seconds in times[n, way]) for times in ranks)
        yield {
            "metrics": n,
            "way": way,
            "ms": 1e3 * statistics.median(wall),
            "cpu_ms": 1e3 * cpu,
            "bytes": sent_bytes(n, way),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--metrics", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="2 processes, 3 metrics, once")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.processes, arguments.metrics, arguments.repeats = 2, [3], 1
    rows = (
        row for n in arguments.metrics for row in measure(n, arguments.processes, arguments.repeats)
    )
    if arguments.json:
        json.dump(
            {"processes": arguments.processes, "torch": torch.__version__, "rows": list(rows)},
            sys.stdout,
            indent=1,
        )
        return
    print(
        f"{arguments.processes} gloo processes; torch {torch.__version__}; Python"
        f" {platform.python_version()}; medians of {arguments.repeats}",
        flush=True,
    )
    print(f"{'metrics':>8} {'way':<26} {'wall ms':>9} {'CPU ms':>9} {'bytes':>9}")
    for row in rows:
        print(
            f"{row['metrics']:>8} {row['way']:<26} {row['ms']:>9.2f} {row['cpu_ms']:>9.2f}"
            f" {row['bytes']:>9}",
            flush=True,
        )


if __name__ == "__main__":
    main()
