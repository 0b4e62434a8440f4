"""Random requests over all settings: only errors that policies announce, and every promise kept."""

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
    costs: tuple[Any, ...] = (
        None,
        rs.TokenCost(),
        rs.QuadraticCost(linear=0),
        rs.TransformerCost(token_flops=10**9, pair_flops=10**5),
    )
    sizes: dict[str, Any] = {"sizes": [size, max(1, rollouts - size)], "all": None}
    return rs.ScheduleRequest(
        total_lengths=columns,
        rollout_ids=ids.tolist(),
        global_batch_size=sizes.get(splitter, size),
        splitter=every_second_rollout if splitter == "user" else splitter,
        dp_size=int(rng.choice([1, 2, 3, 4, 7, 8, 16, 64])),
        cp_size=int(rng.choice([1, 1, 2, 4])),
        vpp_size=int(rng.choice([1, 1, 1, 2])),
        microbatch_group_size_per_vp_stage=int(rng.integers(1, 5)),
        max_tokens_per_gpu=None if static else cap,
        micro_batch_size=int(rng.integers(1, 9)) if static else None,
        balance=balance,
        rank_slack=0.0 if static or balance == "none" else slacks[rng.integers(4)],
        cost=costs[rng.integers(4)],
        on_oversized="alone" if static else oversized[rng.integers(2)],
        on_trailing="partial_step",
        pad_to_multiple=int(rng.choice([1, 1, 2, 8])),
    )


def run_fuzz(seeds: range, most_samples: int) -> None:
    for seed in seeds:
        request = random_request(np.random.default_rng([11, seed]), most_samples)
        plan = rs.plan_schedule(request)
        problems = rs.check_plan(plan, request)
        assert problems == [], f"seed {seed}: {problems[0]}"
        stats = plan.stats
        assert stats.micro_batches >= stats.micro_batch_bound
        assert all(step.rank_imbalance >= step.rank_bound - 1e-9 for step in stats.steps)
        assert all(step.slot_imbalance >= step.slot_bound - 1e-9 for step in stats.steps)
        if request.token_cap is not None and request.balance != "none":
            fewest_by_ffd(request, plan)


def fewest_by_ffd(request: rs.ScheduleRequest, plan: rs.SchedulePlan) -> None:
    """A balanced step has no more micro-batches than first-fit-decreasing, aligned."""
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
        assert count * request.dp_size <= max(
            request.alignment, -(-bins // request.alignment) * request.alignment
        )


def test_a_few_hundred_random_requests_keep_every_promise() -> None:
    run_fuzz(range(250), most_samples=300)


@pytest.mark.fuzz
@pytest.mark.parametrize("block", range(100))
def test_ten_thousand_random_requests_keep_every_promise(block: int) -> None:
    run_fuzz(range(1000 + 100 * block, 1100 + 100 * block), most_samples=5_000)
