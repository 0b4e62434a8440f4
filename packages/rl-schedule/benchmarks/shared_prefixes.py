"""Plans that share prompts beside today's plans that do not; one core, no GPU, a few seconds.

Run: `OMP_NUM_THREADS=1 python benchmarks/shared_prefixes.py`, `--markdown` for the table of the
docs, `--tail pareto` for a heavier tail. Prints one row per prompt:response ratio, rollouts of a
prompt and number of ranks, then whether every target is met (exit 1 if not).

A batch has 64 samples per rank, one rollout per sample, one step. Responses are lognormal (6.4,
1.2) or Pareto (1.1) from 128 on, clipped to [16, 8192]; a prompt has `ratio` times as many tokens
as the mean response, times a lognormal (0, 0.4), clipped to [16, 24576]. The cap is 32,768 tokens,
the cost that of Qwen2.5-7B. "Without" is `plan_schedule` on total lengths. "By chance" is that same
plan, but with each prompt charged once per micro-batch: what a trainer that shares would save
without a planner that knows. A step is simulated as forward plus twice as much backward of the
slowest rank, alone or as a 1F1B pipeline of 4 stages. Times are CPU seconds of the process.
"""

import argparse
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from importlib import metadata

import numpy as np
import numpy.typing as npt

from rl_schedule import (
    PrefixPlan,
    PrefixRequest,
    SchedulePlan,
    ScheduleRequest,
    TransformerCost,
    check_plan,
    check_prefix_plan,
    plan_schedule,
    plan_with_prefixes,
)
from rl_schedule.study.simulation import pipeline_seconds

CAP, PER_RANK = 32_768, 64
QWEN = TransformerCost(token_flops=14_140_571_648, pair_flops=401_408)
RATIOS, ROLLOUTS, RANKS, SEEDS = (1, 4, 16), (8, 16), (8, 64), 5
MOST_SECONDS = 0.1
"""CPU time of one plan of 4,096 samples."""
HEADER = (
    "prompt : response",
    "rollouts",
    "ranks",
    "tokens, millions",
    "FLOPs, shared / without",
    "micro-batches",
    "max/mean of ranks: without",
    "shared",
    "slowest rank, PFLOP",
    "step: without / shared",
    "4 stages",
    "by chance / shared",
    "copies",
    "fillers",
    "CPU ms: without",
    "shared",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One batch, planned both ways; arrays are forward FLOPs [ranks, micro-batches]."""

    without: npt.NDArray[np.float64]
    by_chance: npt.NDArray[np.float64]
    shared: npt.NDArray[np.float64]
    plan: PrefixPlan
    without_seconds: float
    shared_seconds: float
    problems: list[str]


def request_of(ratio: int, rollouts: int, ranks: int, seed: int, tail: str) -> PrefixRequest:
    rng = np.random.default_rng([ratio, rollouts, ranks, seed])
    count = PER_RANK * ranks
    drawn = (
        rng.lognormal(6.4, 1.2, count)
        if tail == "lognormal"
        else 128.0 * (1.0 + rng.pareto(1.1, count))
    )
    responses = np.clip(np.rint(drawn), 16, 8_192).astype(np.int64)
    groups = count // rollouts
    prompts = ratio * responses.mean() * rng.lognormal(0.0, 0.4, groups)
    ids = np.repeat(np.arange(groups), rollouts)
    prefixes = np.clip(np.rint(prompts), 16, 24_576).astype(np.int64)[ids]
    return PrefixRequest(
        schedule=ScheduleRequest(
            total_lengths=prefixes + responses,
            rollout_ids=np.arange(count),
            global_batch_size=None,
            splitter="all",
            dp_size=ranks,
            max_tokens_per_gpu=CAP,
            cost=QWEN,
        ),
        prefix_ids=ids,
        prefix_lengths=prefixes,
    )


def costs_without(plan: SchedulePlan, request: PrefixRequest) -> npt.NDArray[np.float64]:
    costs = QWEN(np.asarray(request.schedule.total_lengths)[plan.sample_positions])
    rows = plan.micro_batch_offsets.size - 1
    sums = np.zeros(rows)
    np.add.at(sums, plan.placed_rows, costs)
    return sums.reshape(plan.dp_size, -1)


def costs_by_chance(plan: SchedulePlan, request: PrefixRequest) -> npt.NDArray[np.float64]:
    ids, prefixes = np.asarray(request.prefix_ids), np.asarray(request.prefix_lengths)
    return np.array(
        [
            [
                request.cost_model.micro_batch(
                    ids[samples], prefixes[samples], request.response_lengths[samples]
                )
                for samples in map(
                    plan.micro_batch_samples,
                    [rank] * plan.micro_batches_per_rank,
                    range(plan.micro_batches_per_rank),
                )
            ]
            for rank in range(plan.dp_size)
        ]
    )


def costs_shared(plan: PrefixPlan, request: PrefixRequest) -> npt.NDArray[np.float64]:
    costs = np.zeros((plan.dp_size, plan.micro_batches_per_rank))
    for rank, number in np.ndindex(costs.shape):
        stream = plan.micro_batch(rank, number)
        costs[rank, number] = request.cost_model.micro_batch(
            stream.prefix_ids[stream.prefix_index],
            stream.prefix_lengths[stream.prefix_index],
            stream.response_lengths,
        )
    return costs


def outcome_of(request: PrefixRequest) -> Outcome:
    started = time.process_time()
    plain = plan_schedule(request.schedule)
    planned = time.process_time()
    plan = plan_with_prefixes(request)
    ended = time.process_time()
    problems = [*check_plan(plain, request.schedule), *check_prefix_plan(plan, request)]
    return Outcome(
        without=costs_without(plain, request),
        by_chance=costs_by_chance(plain, request),
        shared=costs_shared(plan, request),
        plan=plan,
        without_seconds=planned - started,
        shared_seconds=ended - planned,
        problems=[str(problem) for problem in problems],
    )


def step_of(costs: npt.NDArray[np.float64], stages: int) -> float:
    """FLOP time of one step, the slowest rank's, on as many GPUs as there are stages."""
    return float(pipeline_seconds(costs / stages, pp_size=stages).max())


def level(costs: npt.NDArray[np.float64]) -> float:
    return float(costs.sum(axis=1).max() / costs.sum(axis=1).mean())


def row(ratio: int, rollouts: int, ranks: int, outcomes: list[Outcome]) -> list[str]:
    def middle(values: list[float], form: str) -> str:
        return format(statistics.median(values), form)

    def worst(values: list[float]) -> str:
        return f"{statistics.median(values):.4f} / {max(values):.4f}"

    def span(values: list[int]) -> str:
        return "-".join(str(value) for value in sorted({min(values), max(values)}))

    stats = [one.plan.stats[0] for one in outcomes]
    tokens = [
        middle([s.num_tokens_unshared / 1e6 for s in stats], ".2f"),
        middle([s.num_tokens / 1e6 for s in stats], ".2f"),
    ]
    counts = [
        span([one.without.shape[1] for one in outcomes]),
        span([one.shared.shape[1] for one in outcomes]),
    ]
    slowest = [
        middle([step_of(one.without, 1) / 1e15 for one in outcomes], ".1f"),
        middle([step_of(one.shared, 1) / 1e15 for one in outcomes], ".1f"),
    ]
    shared_ms = [one.shared_seconds * 1e3 for one in outcomes]
    return [
        f"{ratio}:1",
        str(rollouts),
        str(ranks),
        " -> ".join(tokens),
        middle([float(one.shared.sum() / one.without.sum()) for one in outcomes], ".3f"),
        " -> ".join(counts),
        worst([level(one.without) for one in outcomes]),
        worst([level(one.shared) for one in outcomes]),
        " -> ".join(slowest),
        middle([step_of(one.without, 1) / step_of(one.shared, 1) for one in outcomes], ".2f"),
        middle([step_of(one.without, 4) / step_of(one.shared, 4) for one in outcomes], ".2f"),
        middle([step_of(one.by_chance, 1) / step_of(one.shared, 1) for one in outcomes], ".2f"),
        middle([s.prefix_copies / s.prefixes for s in stats], ".2f"),
        span([s.fillers for s in stats]),
        middle([one.without_seconds * 1e3 for one in outcomes], ".0f"),
        f"{middle(shared_ms, '.0f')} / {max(shared_ms):.0f}",
    ]


def missed(where: str, outcomes: list[Outcome]) -> list[str]:
    found = [f"{where}: {problem}" for one in outcomes for problem in one.problems]
    for one in outcomes:
        (stats,) = one.plan.stats
        if stats.num_tokens > stats.num_tokens_unshared:
            found.append(f"{where}: more tokens than without sharing")
        if one.shared.shape[1] > one.without.shape[1]:
            found.append(f"{where}: more micro-batches than without sharing")
        if step_of(one.shared, 1) > step_of(one.without, 1):
            found.append(f"{where}: a slower step than without sharing")
        if one.shared_seconds > MOST_SECONDS:
            found.append(f"{where}: {one.shared_seconds:.3f} s of CPU, allowed {MOST_SECONDS}")
    return found


def write(cells: list[str], *, markdown: bool) -> None:
    widths = [max(len(title), 8) for title in HEADER]
    sys.stdout.write(
        "| " + " | ".join(cells) + " |\n"
        if markdown
        else "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip() + "\n"
    )
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tail", choices=["lognormal", "pareto"], default="lognormal")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="one small batch; nothing is checked")
    options = parser.parse_args()
    ranks = (2,) if options.tiny else RANKS
    # The first plans of a process load numpy's routines.
    outcome_of(request_of(1, 8, 2, 0, options.tail))
    write(list(HEADER), markdown=options.markdown)
    if options.markdown:
        write(["---"] * len(HEADER), markdown=True)
    problems: list[str] = []
    for count in ranks:
        for ratio in RATIOS:
            for rollouts in ROLLOUTS:
                outcomes = [
                    outcome_of(request_of(ratio, rollouts, count, seed, options.tail))
                    for seed in range(1 if options.tiny else SEEDS)
                ]
                write(row(ratio, rollouts, count, outcomes), markdown=options.markdown)
                if not options.tiny:
                    problems += missed(f"{ratio}:1, {rollouts} rollouts, {count} ranks", outcomes)
    versions = ", ".join(
        f"{package} {metadata.version(package)}" for package in ("rl-schedule", "numpy")
    )
    sys.stdout.write(
        f"\n{platform.machine()}, Python {platform.python_version()}, {versions}; {options.tail}\n"
    )
    sys.stdout.write(
        "every target is met\n" if not problems else "MISSED\n" + "\n".join(problems) + "\n"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
