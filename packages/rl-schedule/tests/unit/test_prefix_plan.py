"""Plans with shared prefixes: layout by hand, policies, and the digest."""

import logging
import os
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rl_schedule as rs
from rl_schedule.arrays import IntArray
from rl_schedule.prefix.plan import ARRAY_NAMES


def plan(
    prefixes: dict[int, tuple[int, list[int]]] | list[tuple[int, int, int]], **settings: Any
) -> tuple[rs.PrefixPlan, rs.PrefixRequest]:
    """Plan samples, given as (prefix id, prefix tokens, response tokens) or grouped by id."""
    samples = (
        [(key, size, length) for key, (size, lengths) in prefixes.items() for length in lengths]
        if isinstance(prefixes, dict)
        else prefixes
    )
    ids, sizes, lengths = (list(column) for column in zip(*samples, strict=True))
    given: dict[str, Any] = {
        "total_lengths": [size + length for _, size, length in samples],
        "rollout_ids": list(range(len(samples))),
        "global_batch_size": len(samples),
        "dp_size": 1,
        "max_tokens_per_gpu": 1000,
    }
    request = rs.PrefixRequest(
        schedule=rs.ScheduleRequest(**given | settings), prefix_ids=ids, prefix_lengths=sizes
    )
    made = rs.plan_with_prefixes(request)
    assert rs.check_prefix_plan(made, request) == []
    assert [len(lengths)] == [made.sample_positions.size + len(made.dropped_samples)], (
        "placed or dropped"
    )
    return made, request


def test_the_worked_example_of_the_docs() -> None:
    made, _ = plan([(4, 3, 2), (9, 2, 4), (4, 3, 1)])
    stream = made.micro_batch(0, 0)
    assert stream.samples.tolist() == [0, 2, 1]
    assert stream.prefix_ids.tolist() == [4, 9]
    assert stream.prefix_index.tolist() == [0, 0, 1]
    assert stream.prefix_offsets.tolist() == [0, 6]
    assert stream.prefix_lengths.tolist() == [3, 2]
    assert stream.response_offsets.tolist() == [3, 5, 8]
    assert stream.response_lengths.tolist() == [2, 1, 4]
    assert stream.num_tokens == 12
    assert stream.position_ids().tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 4, 5]
    assert ["".join("#."[not seen] for seen in row) for row in stream.attention_mask()] == [
        "#...........",
        "##..........",
        "###.........",
        "####........",
        "#####.......",
        "###..#......",
        "......#.....",
        "......##....",
        "......###...",
        "......####..",
        "......#####.",
        "......######",
    ]


def test_arrays_of_a_plan_by_hand() -> None:
    # Two groups of 10 + 1 + 1 tokens under 12: one micro-batch each, on two ranks.
    made, _ = plan({5: (10, [1, 1]), 3: (10, [1, 1])}, dp_size=2, max_tokens_per_gpu=12)
    arrays = {name: array.tolist() for name, array in made.arrays().items()}
    assert arrays == {
        "sample_positions": [0, 1, 2, 3],
        "response_lengths": [1, 1, 1, 1],
        "tree_sample_offsets": [0, 2, 4],
        "tree_prefix_ids": [5, 3],
        "tree_prefix_lengths": [10, 10],
        "micro_batch_offsets": [0, 1, 2],
        "num_microbatches": [1],
        "global_batch_sizes": [4],
        "dropped_samples": [],
        "dropped_rollouts": [],
        "oversized_samples": [],
        "filler_micro_batches": [],
    }
    assert tuple(arrays) == ARRAY_NAMES
    assert made.micro_batch_tokens.tolist() == [[12], [12]]
    assert made.micro_batches_per_rank == 1
    assert not made.sample_positions.flags.writeable


def test_figures_of_a_step_by_hand() -> None:
    made, _ = plan(
        {5: (10, [1, 1]), 3: (10, [1, 1])},
        dp_size=2,
        max_tokens_per_gpu=12,
        cost=rs.QuadraticCost(linear=1),
    )
    (stats,) = made.stats
    # A rank: c(10) = 110, and c(11) - c(10) = 22 for each of two responses.
    assert stats.slowest_rank_cost == stats.slowest_rank_bound == 154.0
    assert (stats.num_tokens, stats.num_tokens_unshared) == (24, 44)
    assert (stats.prefixes, stats.prefix_copies, stats.fill) == (2, 2, 1.0)
    assert (stats.micro_batches, stats.micro_batch_bound, stats.fillers) == (1, 1, 0)
    assert (stats.rank_imbalance, stats.slot_imbalance) == (1.0, 1.0)
    assert (stats.num_rollouts, stats.num_samples, stats.path) == (4, 4, "shared(1)")


def test_a_group_larger_than_a_micro_batch_pays_its_prefix_in_each() -> None:
    # 6 + 4 responses of 3 under 15: three beside the prefix, so two micro-batches of 15 and 9.
    made, _ = plan({0: (6, [3, 3, 3, 3])}, max_tokens_per_gpu=15)
    assert made.num_microbatches == (2,)
    assert sorted(made.micro_batch_tokens.ravel().tolist()) == [9, 15]
    assert made.tree_prefix_ids.tolist() == [0, 0]
    assert made.stats[0].num_tokens == 24


def test_a_costly_group_is_split_over_ranks_where_that_is_faster() -> None:
    # Whole: 10 * 40 tokens on one rank. Halved: 10 + 5 * 40 on each.
    made, _ = plan({0: (10, [40] * 10)}, dp_size=2, cost=rs.TokenCost())
    assert made.micro_batch_tokens.tolist() == [[210], [210]]
    assert made.stats[0].prefix_copies == 2


def test_a_prefix_dearer_than_the_work_it_would_spread_stays_in_one_place() -> None:
    # Splitting the group would make both ranks run the 500 tokens of its prefix.
    made, _ = plan({0: (500, [1, 1]), 1: (490, [1, 1])}, dp_size=2, cost=rs.TokenCost())
    assert sorted(made.micro_batch_tokens.ravel().tolist()) == [492, 502]


def test_nothing_to_share_gives_as_many_tokens_as_without() -> None:
    samples = [(i, 5, 1 + i) for i in range(12)]
    made, request = plan(samples, dp_size=2, max_tokens_per_gpu=40)
    assert made.stats[0].num_tokens == made.stats[0].num_tokens_unshared
    assert made.num_microbatches == rs.plan_schedule(request.schedule).num_microbatches


def test_samples_of_no_prefix_have_a_tree_of_their_own_length() -> None:
    made, _ = plan([(0, 0, 3), (0, 0, 4)])
    stream = made.micro_batch(0, 0)
    assert stream.position_ids().tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert stream.num_tokens == 7


def test_an_oversized_sample_runs_alone_and_is_listed() -> None:
    made, _ = plan({0: (10, [2, 30, 2])}, max_tokens_per_gpu=20)
    assert made.oversized_samples == (1,)
    assert sorted(made.micro_batch_tokens.ravel().tolist()) == [14, 40]


def test_a_prefix_above_the_cap_leaves_every_sample_alone() -> None:
    made, _ = plan({0: (30, [1, 1, 2])}, max_tokens_per_gpu=20)
    assert made.oversized_samples == (0, 1, 2)
    assert sorted(made.micro_batch_tokens.ravel().tolist()) == [31, 31, 32]


def test_oversized_samples_are_refused_or_dropped_with_their_rollout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group: dict[int, tuple[int, list[int]]] = {0: (10, [2, 30, 2, 31, 32, 33, 34, 35])}
    ids = [0, 1, 1, 2, 3, 4, 5, 6]
    with pytest.raises(
        rs.InfeasibleScheduleError, match=r"6 samples exceed the cap of 20 .*: 1 \(40 tokens\), 3"
    ):
        plan(group, max_tokens_per_gpu=20, rollout_ids=ids, on_oversized="error")
    with caplog.at_level(logging.WARNING, "rl_schedule"):
        made, _ = plan(
            group,
            max_tokens_per_gpu=20,
            rollout_ids=ids,
            on_oversized="drop",
            global_batch_size=1,
        )
    assert made.dropped_samples == (1, 2, 3, 4, 5, 6, 7)
    assert made.dropped_rollouts == (1, 2, 3, 4, 5, 6)
    assert "dropping 6 of 7 rollouts with a sample above 20 tokens" in caplog.text


def test_steps_are_those_of_a_plan_without_sharing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        made, request = plan(
            {0: (4, [1, 2, 3, 4, 5]), 1: (3, [2, 2, 2, 2])},
            global_batch_size=2,
            rollout_ids=[0, 0, 1, 2, 2, 3, 3, 4, 4],
            dp_size=2,
        )
        plain = rs.plan_schedule(request.schedule)
    assert made.global_batch_sizes == plain.global_batch_sizes == (2, 2)
    assert made.dropped_samples == plain.dropped_samples == (7, 8)
    assert made.dropped_rollouts == plain.dropped_rollouts == (4,)
    # The prefix of a group in two steps is paid in both.
    assert [stats.num_samples for stats in made.stats] == [3, 4]


def test_counts_are_multiples_of_the_pipeline_group() -> None:
    made, _ = plan(
        {0: (4, [1] * 6), 1: (4, [1] * 6)},
        dp_size=2,
        vpp_size=2,
        microbatch_group_size_per_vp_stage=3,
        max_tokens_per_gpu=10,
    )
    assert made.num_microbatches == (3,)


def test_a_filler_stays_where_filling_it_would_slow_the_slowest_rank() -> None:
    # Groups of 195, 101 and 100 tokens need three of four micro-batches of 200; the first is alone
    # on its rank, and whatever joined it there would bring 94 tokens of prefix or more.
    group = {0: (190, [2, 3]), 1: (95, [3, 3]), 2: (94, [3, 3])}
    settings: dict[str, Any] = {"dp_size": 2, "max_tokens_per_gpu": 200, "cost": rs.TokenCost()}
    made, _ = plan(group, **settings)
    assert made.num_microbatches == (2,)
    assert sorted(made.micro_batch_tokens.ravel().tolist()) == [0, 100, 101, 195]
    assert len(made.filler_micro_batches) == 1
    # Under "error" every micro-batch gets a sample, whatever that costs.
    forced, _ = plan(group, on_misaligned="error", **settings)
    assert forced.filler_micro_batches == ()


def test_fewer_samples_than_micro_batches_are_fillers_or_refused() -> None:
    made, _ = plan({0: (4, [1, 2])}, dp_size=3)
    assert made.filler_micro_batches == ((2, 0),)
    assert made.micro_batch(2, 0).num_tokens == 0
    assert made.micro_batch(2, 0).position_ids().size == 0
    with pytest.raises(rs.InfeasibleScheduleError, match="step 0 has 2 samples but needs 3"):
        plan({0: (4, [1, 2])}, dp_size=3, on_misaligned="error")


@pytest.mark.parametrize(("rank", "number"), [(-1, 0), (2, 0), (0, 1), (0, -1)])
def test_an_unknown_micro_batch_is_an_error(rank: int, number: int) -> None:
    made, _ = plan({0: (4, [1, 2])}, dp_size=2)
    with pytest.raises(rs.ScheduleError, match=f"no micro-batch {number} of rank {rank}"):
        made.micro_batch(rank, number)


def test_plans_are_equal_when_their_digests_are() -> None:
    one, _ = plan({0: (4, [1, 2])})
    same, _ = plan({0: (4, [1, 2])})
    other, _ = plan({0: (4, [2, 2])})
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != "a plan"


PROGRAM = """
import numpy as np, rl_schedule as rs
rng = np.random.default_rng(3)
prefix = rng.integers(50, 900, 40)
ids = rng.integers(0, 40, 500)
total = prefix[ids] + np.rint(rng.lognormal(5, 1.5, 500)).clip(1, 3000).astype(int)
print(rs.plan_with_prefixes(rs.PrefixRequest(
    schedule=rs.ScheduleRequest(total_lengths=total, rollout_ids=range(500), global_batch_size=250,
        dp_size=4, max_tokens_per_gpu=4096),
    prefix_ids=ids, prefix_lengths=prefix[ids])).digest)
"""


def test_the_digest_does_not_depend_on_the_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(digests) == 1


def test_ids_are_names_only() -> None:
    """Other ids for the same groups give the same places."""
    one, _ = plan({0: (9, [5, 6, 7]), 1: (8, [9, 2])}, dp_size=2, max_tokens_per_gpu=30)
    two, _ = plan({70: (9, [5, 6, 7]), -4: (8, [9, 2])}, dp_size=2, max_tokens_per_gpu=30)
    assert np.array_equal(one.sample_positions, two.sample_positions)
    assert np.array_equal(one.micro_batch_offsets, two.micro_batch_offsets)
    assert set(two.tree_prefix_ids.tolist()) == {70, -4}


def transformer(
    tokens: IntArray, positions: IntArray, mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Two layers of rotary attention and a gated MLP with fixed random weights, [L, 8]; float64."""
    rng = np.random.default_rng(5)
    hidden = rng.normal(size=(50, 8))[tokens]
    angles = positions[:, None] * np.array([1.0, 0.3, 0.1, 0.03])
    turn = np.cos(angles) + 1j * np.sin(angles)
    for _ in range(2):
        query, key, value, gate, up = (hidden @ rng.normal(size=(8, 8)) for _ in range(5))
        rotated = [(x[:, :4] + 1j * x[:, 4:]) * turn for x in (query, key)]
        scores = np.where(mask, (rotated[0] @ rotated[1].conj().T).real, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        hidden = hidden + weights @ value / weights.sum(axis=1, keepdims=True)
        hidden = np.tanh(hidden + np.tanh(gate) * up)
    return np.asarray(hidden)


def test_a_transformer_gives_each_token_what_it_gives_it_in_its_own_sample() -> None:
    made, request = plan({0: (5, [3, 1, 4]), 1: (0, [2]), 2: (3, [6, 2])}, dp_size=1)
    rng = np.random.default_rng(1)
    prompts = {0: rng.integers(0, 50, 5), 1: rng.integers(0, 50, 0), 2: rng.integers(0, 50, 3)}
    responses = [rng.integers(0, 50, length) for length in request.response_lengths]
    stream = made.micro_batch(0, 0)
    tokens = np.full(stream.num_tokens, -1)
    for key, start, length in zip(
        stream.prefix_ids.tolist(), stream.prefix_offsets, stream.prefix_lengths, strict=True
    ):
        tokens[start : start + length] = prompts[key]
    for sample, start in zip(stream.samples, stream.response_offsets, strict=True):
        tokens[start : start + responses[sample].size] = responses[sample]
    shared = transformer(tokens, stream.position_ids(), stream.attention_mask())
    for sample, index, start in zip(
        stream.samples, stream.prefix_index, stream.response_offsets, strict=True
    ):
        prompt = prompts[int(stream.prefix_ids[index])]
        whole = np.concatenate([prompt, responses[sample]])
        alone = transformer(whole, np.arange(whole.size), np.tri(whole.size, dtype=np.bool_))
        first = stream.prefix_offsets[index]
        assert np.allclose(shared[first : first + prompt.size], alone[: prompt.size])
        assert np.allclose(shared[start : start + responses[sample].size], alone[prompt.size :])
