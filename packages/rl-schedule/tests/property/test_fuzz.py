"""Random requests over all settings: only errors that policies announce, and every promise kept."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.arrays import IntArray


def every_second_rollout(
    *,
    rollout_samples: IntArray,
    rollout_tokens: IntArray,
    global_batch_size: int | None,
    dp_size: int,
) -> list[int]:
    """A user's splitter: steps of two rollouts."""
    del rollout_tokens, global_batch_size, dp_size
    return [2] * (len(rollout_samples) // 2)


def random_request(rng: np.random.Generator, most_samples: int) -> rs.ScheduleRequest:
    """Draw a request whose policies allow its data; sizes are log-uniform up to `most_samples`."""
    count = int(np.exp(rng.uniform(0, np.log(most_samples + 0.5))))
    cap = int(np.exp(rng.uniform(np.log(8), np.log(40_000))))
    shape = rng.choice(["lognormal", "uniform", "equal", "bimodal", "tight"])
    if shape == "lognormal":
        lengths = rng.lognormal(np.log(cap) - rng.uniform(0, 4), rng.uniform(0.1, 1.5), count)
    elif shape == "uniform":
        lengths = rng.uniform(1, cap * rng.uniform(0.05, 1.2) + 1, count)
    elif shape == "equal":
        lengths = np.full(count, max(1.0, cap * rng.uniform(0.02, 1.1)))
    elif shape == "bimodal":
        lengths = np.where(
            rng.random(count) < 0.2,
            rng.normal(cap / 2.7, cap / 20, count),
            rng.normal(cap / 100, cap / 500, count),
        )
    else:
        lengths = cap / rng.integers(1, 6, count) + rng.integers(-1, 2, count)
    columns = np.clip(np.rint(lengths), 1, 2 * cap).astype(np.int64)
    fan_out = int(rng.integers(3))
    ids = (
        np.arange(count),
        np.cumsum(rng.random(count) < 0.6),
        rng.integers(-5, max(1, count // 2), count),
    )[fan_out]
    rollouts = len(np.unique(ids))
    splitter = str(rng.choice(["fixed", "sizes", "all", "user"]))
    size = int(rng.integers(1, rollouts + 1))
    static = rng.random() < 0.15
    balances: tuple[Literal["none", "tokens", "flops"], ...] = ("none", "tokens", "flops", "flops")
    slacks: tuple[float | Literal["auto"], ...] = (0.0, 0.0, 0.004, "auto")
    oversized: tuple[Literal["alone", "drop"], ...] = ("alone", "drop")
    balance = balances[rng.integers(4)]
    extras: tuple[Literal["auto", 0], ...] = ("auto", 0)
    costs: tuple[Any, ...] = (
        None,
        rs.TokenCost(),
        rs.QuadraticCost(linear=0),
        rs.TransformerCost(token_flops=10**9, pair_flops=10**5),
    )
    sizes: dict[str, Any] = {"sizes": [size, max(1, rollouts - size)], "all": None}
    limits: dict[str, Any] = {}
    if rng.random() < 0.4:
        limits = random_limits(rng, np.asarray(ids, dtype=np.int64), static)
    no_slack = static or balance == "none" or {"equal_samples", "pad_to_longest"} & {*limits}
    return rs.ScheduleRequest(
        **limits,
        total_lengths=columns,
        rollout_ids=ids.tolist(),
        global_batch_size=sizes.get(splitter, size),
        splitter=every_second_rollout if splitter == "user" else splitter,
        dp_size=int(rng.choice([1, 2, 3, 4, 7, 8, 16, 64])),
        cp_size=int(rng.choice([1, 1, 2, 4])),
        vpp_size=int(rng.choice([1, 1, 1, 2])),
        microbatch_group_size_per_vp_stage=int(rng.integers(1, 5)),
        max_tokens_per_gpu=None if static else cap,
        micro_batch_size=int(rng.integers(2 if limits else 1, 9)) if static else None,
        balance=balance,
        rank_slack=0.0 if no_slack else slacks[rng.integers(4)],
        cost=costs[rng.integers(4)],
        on_oversized="alone" if static else oversized[rng.integers(2)],
        on_trailing="partial_step",
        pad_to_multiple=int(rng.choice([1, 1, 2, 8])),
        extra_micro_batches=extras[rng.integers(2)],
    )


def random_limits(rng: np.random.Generator, ids: IntArray, static: bool) -> dict[str, Any]:
    """Draw what micro-batches must keep besides the cap; no unit has more than two samples."""
    limits: dict[str, Any] = {}
    if rng.random() < 0.4:
        limits["sample_costs"] = rng.uniform(0, 1e6, ids.size)
    if rng.random() < 0.5:
        # Neighbours of one rollout in pairs: a unit is a rollout and half of a running number.
        number = np.zeros(ids.size, dtype=np.int64)
        for rollout in np.unique(ids):
            number[ids == rollout] = np.arange(np.count_nonzero(ids == rollout)) // 2
        limits["keep_together"] = [f"{i}.{k}" for i, k in zip(ids, number, strict=True)]
    if not static and rng.random() < 0.6:
        limits["max_samples_per_micro_batch"] = int(rng.integers(2, 9))
    if not static and rng.random() < 0.3:
        limits["pad_to_longest"] = True
    if rng.random() < 0.2:
        limits["equal_samples"] = True
    return limits


def broken_by_hand(request: rs.ScheduleRequest, plan: rs.SchedulePlan) -> Iterator[str]:
    """Every promise but P8 and P10, in plain Python, from nothing but the plan's samples."""
    multiple, ids = request.pad_to_multiple, np.asarray(request.rollout_ids).tolist()
    lengths = [math.ceil(n / multiple) * multiple for n in np.asarray(request.total_lengths)]
    kept = range(len(ids)) if request.keep_together is None else request.keep_together
    unit = [int(k) for k in np.asarray(kept)]

    def size(samples: list[int]) -> int:
        if request.pad_to_longest:
            return max((lengths[i] for i in samples), default=0) * len(samples)
        return sum(lengths[i] for i in samples)

    group = request.microbatch_group_size_per_vp_stage if request.vpp_size > 1 else 1
    seen, step_of = Counter[int](), dict[int, set[int]]()
    fillers, start = [], 0
    for step, count in enumerate(plan.num_microbatches):
        if count < 1 or count % group:
            yield f"step {step} has {count} micro-batches"
        ranks = []
        for rank in range(plan.dp_size):
            own = 0
            for number in range(start, start + count):
                samples = plan.micro_batch_samples(rank, number).tolist()
                own += len(samples)
                seen.update(samples)
                units = {unit[i] for i in samples}
                for i in samples:
                    step_of.setdefault(ids[i], set()).add(step)
                if not samples:
                    fillers.append((rank, number))
                if [i for i in range(len(ids)) if unit[i] in units] != sorted(samples):
                    yield f"{samples} lack samples they are kept together with"
                most = request.micro_batch_size or request.max_samples_per_micro_batch
                if most is not None and len(samples) > most:
                    yield f"{samples} are more than {most}"
                if request.token_cap and len(units) > 1 and size(samples) > request.token_cap:
                    yield f"{samples} take {size(samples)} tokens"
            ranks.append(own)
        if request.equal_samples and len(set(ranks)) > 1:
            yield f"ranks have {ranks} samples"
        start += count
    if any(times > 1 for times in seen.values()):
        yield "a sample runs twice"
    if sorted(set(range(len(ids))) - set(seen)) != list(plan.dropped_samples):
        yield "dropped_samples are not what is missing"
    if any(len(steps) > 1 for steps in step_of.values()):
        yield "a rollout is in two steps"
    if {ids[i] for i in plan.dropped_samples} != set(plan.dropped_rollouts):
        yield "dropped_rollouts are not what is missing, or a rollout runs in part"
    if fillers != sorted(plan.filler_micro_batches, key=lambda f: (bisect(plan, f[1]), f)):
        yield "filler_micro_batches are not those without samples"


def bisect(plan: rs.SchedulePlan, number: int) -> int:
    """The step of a micro-batch."""
    return int(np.searchsorted(np.cumsum(plan.num_microbatches), number, side="right"))


def run_fuzz(seeds: range, most_samples: int) -> None:
    for seed in seeds:
        request = random_request(np.random.default_rng([11, seed]), most_samples)
        try:
            plan = rs.plan_schedule(request)
        except rs.InfeasibleScheduleError as error:
            assert request.equal_samples and "cannot share equally" in str(error)
            continue
        problems = rs.check_plan(plan, request)
        assert problems == [], f"seed {seed}: {problems[0]}"
        if len(np.asarray(request.rollout_ids)) <= 300:
            assert list(broken_by_hand(request, plan)) == [], f"seed {seed}"
        stats = plan.stats
        assert stats.micro_batches >= stats.micro_batch_bound
        assert all(step.rank_imbalance >= step.rank_bound - 1e-9 for step in stats.steps)
        assert all(step.slot_imbalance >= step.slot_bound - 1e-9 for step in stats.steps)
        if request.token_cap is not None and request.balance != "none" and not request.has_limits:
            fewest_by_ffd(request, plan)


def fewest_by_ffd(request: rs.ScheduleRequest, plan: rs.SchedulePlan) -> None:
    """A balanced step has no more micro-batches than first-fit-decreasing, aligned.

    And one more per rank if that is allowed.
    """
    assert request.token_cap is not None
    ends = np.cumsum([0, *plan.num_microbatches])
    for step, count in enumerate(plan.num_microbatches):
        members = np.concatenate(
            [
                plan.micro_batch_samples(r, k)
                for r in range(plan.dp_size)
                for k in range(ends[step], ends[step + 1])
            ]
        )
        bins = len(rs.first_fit_decreasing(request.padded_lengths[members], request.token_cap))
        extra = request.dp_size if request.extra_micro_batches == "auto" else 0
        assert count * request.dp_size <= extra + max(
            request.alignment, -(-bins // request.alignment) * request.alignment
        )


def test_a_few_hundred_random_requests_keep_every_promise() -> None:
    run_fuzz(range(250), most_samples=300)


@pytest.mark.fuzz
@pytest.mark.parametrize("block", range(100))
def test_ten_thousand_random_requests_keep_every_promise(block: int) -> None:
    run_fuzz(range(1000 + 100 * block, 1100 + 100 * block), most_samples=5_000)
