"""Laws of plans with shared prefixes, on random batches."""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_schedule as rs
from rl_schedule.arrays import IntArray
from rl_schedule.packing import bin_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A request and its plan."""

    request: rs.PrefixRequest
    plan: rs.PrefixPlan

    @property
    def ids(self) -> IntArray:
        return np.asarray(self.request.prefix_ids)

    def rows(self) -> list[rs.PrefixMicroBatch]:
        return [
            self.plan.micro_batch(rank, number)
            for rank in range(self.plan.dp_size)
            for number in range(self.plan.micro_batches_per_rank)
        ]


COSTS: tuple[Any, ...] = (
    None,
    rs.TokenCost(),
    rs.QuadraticCost(linear=0),
    rs.TransformerCost(token_flops=100, pair_flops=7, window_pair_flops=((8, 3),)),
)


@st.composite
def batches(draw: st.DrawFn, /, **fixed: Any) -> Batch:
    groups = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8))
    samples = draw(
        st.lists(
            st.tuples(st.integers(0, len(groups) - 1), st.integers(1, 40)), min_size=1, max_size=40
        )
    )
    ids = [group for group, _ in samples]
    settings: dict[str, Any] = {
        "total_lengths": [groups[group] + length for group, length in samples],
        "rollout_ids": [draw(st.integers(0, 20)) for _ in samples],
        "global_batch_size": draw(st.integers(1, 20)),
        "dp_size": draw(st.integers(1, 5)),
        "vpp_size": draw(st.sampled_from([1, 1, 2])),
        "microbatch_group_size_per_vp_stage": draw(st.integers(1, 3)),
        "max_tokens_per_gpu": draw(st.integers(20, 120)),
        "balance": draw(st.sampled_from(["flops", "tokens"])),
        "cost": draw(st.sampled_from(COSTS)),
        "on_trailing": "partial_step",
    }
    request = rs.PrefixRequest(
        schedule=rs.ScheduleRequest(**settings | fixed),
        prefix_ids=ids,
        prefix_lengths=[groups[group] for group in ids],
    )
    return Batch(request=request, plan=rs.plan_with_prefixes(request))


@given(batches())
def test_every_promise_is_kept(batch: Batch) -> None:
    assert rs.check_prefix_plan(batch.plan, batch.request) == []


@given(batches())
def test_every_sample_runs_exactly_once(batch: Batch) -> None:
    placed = [sample for stream in batch.rows() for sample in stream.samples.tolist()]
    assert sorted(placed) == list(range(batch.ids.size))


@given(batches())
def test_the_cap_is_never_exceeded_but_by_one_oversized_sample_alone(batch: Batch) -> None:
    for stream in batch.rows():
        assert stream.num_tokens <= batch.request.token_cap or stream.samples.size == 1


@given(batches())
def test_a_prefix_is_charged_once_per_micro_batch(batch: Batch) -> None:
    for stream in batch.rows():
        prefixes = batch.ids[stream.samples]
        lengths = np.asarray(batch.request.prefix_lengths)[stream.samples]
        assert sorted(stream.prefix_ids.tolist()) == sorted(set(prefixes.tolist()))
        assert np.array_equal(stream.prefix_ids[stream.prefix_index], prefixes)
        once = dict(zip(prefixes.tolist(), lengths.tolist(), strict=True))
        responses = batch.request.response_lengths[stream.samples]
        assert stream.num_tokens == sum(once.values()) + int(responses.sum())


@given(batches())
def test_segments_tile_the_stream(batch: Batch) -> None:
    """Every place belongs to one prefix or one response, and continues its sample's positions."""
    for stream in batch.rows():
        starts = np.concatenate([stream.prefix_offsets, stream.response_offsets])
        lengths = np.concatenate([stream.prefix_lengths, stream.response_lengths])
        places = np.concatenate(
            [np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)] or [starts]
        )
        assert sorted(places.tolist()) == list(range(stream.num_tokens))
        # A token attends to as many tokens as its position says, and itself.
        assert np.array_equal(stream.attention_mask().sum(axis=1), stream.position_ids() + 1)


@given(batches())
def test_micro_batch_tokens_are_those_of_the_streams(batch: Batch) -> None:
    tokens = [stream.num_tokens for stream in batch.rows()]
    assert batch.plan.micro_batch_tokens.ravel().tolist() == tokens
    assert sum(tokens) == sum(stats.num_tokens for stats in batch.plan.stats)


@given(batches())
def test_figures_are_those_of_the_cost_model(batch: Batch) -> None:
    if len(batch.plan.stats) != 1:
        return
    ids, prefixes = batch.ids, np.asarray(batch.request.prefix_lengths)
    costs = [
        batch.request.cost_model.micro_batch(
            ids[stream.samples], prefixes[stream.samples], stream.response_lengths
        )
        for stream in batch.rows()
    ]
    cost_DM = np.reshape(costs, (batch.plan.dp_size, -1))
    (stats,) = batch.plan.stats
    assert stats.slowest_rank_cost == pytest.approx(cost_DM.sum(axis=1).max())
    assert stats.rank_imbalance * cost_DM.sum() / batch.plan.dp_size == pytest.approx(
        cost_DM.sum(axis=1).max()
    )
    assert stats.slot_imbalance * cost_DM.sum() / batch.plan.dp_size == pytest.approx(
        cost_DM.max(axis=0).sum()
    )
    assert stats.slowest_rank_bound <= stats.slowest_rank_cost
    assert stats.micro_batch_bound <= stats.micro_batches


@given(batches(balance="flops", cost=rs.QuadraticCost(linear=50), extra_micro_batches=0))
def test_never_more_tokens_micro_batches_or_work_of_the_slowest_rank_than_without_sharing(
    batch: Batch,
) -> None:
    plain = rs.plan_schedule(batch.request.schedule)
    totals = np.asarray(batch.request.schedule.total_lengths)
    costs, ends = 50 * totals + totals**2, np.cumsum([0, *plain.num_microbatches])
    for step, stats in enumerate(batch.plan.stats):
        rows, tokens = plain.placed_rows, totals[plain.sample_positions]
        inside = plain.placed_steps == step
        ranks = rows[inside] // max(1, int(ends[-1]))
        slowest = bin_sums(costs[plain.sample_positions][inside], ranks, plain.dp_size).max()
        assert stats.num_tokens <= stats.num_tokens_unshared == tokens[inside].sum()
        assert stats.micro_batches <= plain.num_microbatches[step]
        assert stats.slowest_rank_cost <= slowest


@given(batches())
def test_equal_requests_give_equal_plans(batch: Batch) -> None:
    assert rs.plan_with_prefixes(batch.request).digest == batch.plan.digest


@given(batches(on_misaligned="split_then_filler"), st.integers(-5, 5), st.integers(2, 9))
def test_ids_are_names_only(batch: Batch, shift: int, factor: int) -> None:
    renamed = rs.PrefixRequest(
        schedule=batch.request.schedule,
        prefix_ids=batch.ids * -factor + shift,
        prefix_lengths=batch.request.prefix_lengths,
    )
    plan = rs.plan_with_prefixes(renamed)
    assert np.array_equal(plan.sample_positions, batch.plan.sample_positions)
    assert np.array_equal(plan.tree_sample_offsets, batch.plan.tree_sample_offsets)


def random_request(rng: np.random.Generator, most_samples: int) -> rs.PrefixRequest:
    """Draw a batch of log-uniform size, heavy tails, prefixes up to above the cap included."""
    count = int(np.exp(rng.uniform(0, np.log(most_samples + 0.5))))
    cap = int(np.exp(rng.uniform(np.log(8), np.log(40_000))))
    groups = int(rng.integers(1, count + 1))
    ids = rng.integers(0, groups, count)
    most = int(cap * rng.choice([0.1, 0.5, 0.9, 1.1]))
    prefixes = rng.integers(0, most + 1, groups)[ids]
    responses = rng.lognormal(np.log(cap) - rng.uniform(0.5, 4), rng.uniform(0.1, 1.5), count)
    totals = prefixes + np.clip(np.rint(responses), 1, 2 * cap).astype(np.int64)
    rollouts = np.cumsum(rng.random(count) < rng.choice([0.6, 1.0]), dtype=np.int64)
    settings: dict[str, Any] = {
        "global_batch_size": int(rng.integers(1, len(np.unique(rollouts)) + 1)),
        "dp_size": int(rng.choice([1, 2, 3, 7, 8, 16, 64])),
        "cp_size": int(rng.choice([1, 2])),
        "vpp_size": int(rng.choice([1, 1, 2])),
        "microbatch_group_size_per_vp_stage": int(rng.integers(1, 4)),
        "max_tokens_per_gpu": cap,
        "balance": str(rng.choice(["flops", "tokens"])),
        "cost": COSTS[rng.integers(len(COSTS))],
        "on_oversized": str(rng.choice(["alone", "drop"])),
        "on_misaligned": str(rng.choice(["split_then_filler", "error"])),
        "on_trailing": "partial_step",
    }
    return rs.PrefixRequest(
        schedule=rs.ScheduleRequest(total_lengths=totals, rollout_ids=rollouts, **settings),
        prefix_ids=ids,
        prefix_lengths=prefixes,
    )


def run_fuzz(seeds: range, most_samples: int) -> None:
    logging.getLogger("rl_schedule").setLevel(logging.ERROR)
    for seed in seeds:
        request = random_request(np.random.default_rng([12, seed]), most_samples)
        settings = {request.schedule.on_oversized, request.schedule.on_misaligned}
        try:
            plan = rs.plan_with_prefixes(request)
        except rs.InfeasibleScheduleError:
            assert "drop" in settings or "error" in settings
            continue
        assert not plan.filler_micro_batches or "error" not in settings
        problems = rs.check_prefix_plan(plan, request)
        assert problems == [], f"seed {seed}: {problems[0]}"


def test_a_few_hundred_random_requests_keep_every_promise() -> None:
    run_fuzz(range(200), most_samples=300)


@pytest.mark.fuzz
@pytest.mark.parametrize("block", range(20))
def test_two_thousand_random_requests_keep_every_promise(block: int) -> None:
    run_fuzz(range(1000 + 100 * block, 1100 + 100 * block), most_samples=2_000)
