"""Laws of the reducers on random micro-batches.

Checked against the float64 reference and against the value of one rank.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_metrics import (
    AGGREGATIONS,
    Aggregation,
    ContextParallel,
    Layout,
    count_step_units,
    loss_denominators,
    packed_responses,
)
from rl_metrics.aggregation import loss_reduction as reference
from rl_metrics.selftest.scenario import CONSTANT, make_scenario
from rl_metrics.torch import loss_reducer, slice_response, slice_tokens

LAYOUTS: tuple[Layout, Layout] = ("zigzag", "contiguous")
Ints = npt.NDArray[np.int64]


def _random_batch(
    rng: np.random.Generator,
) -> tuple[Ints, Ints, list[npt.NDArray[np.int32]], npt.NDArray[np.float64], Ints]:
    n = int(rng.integers(1, 7))
    responses = rng.integers(0, 25, n)
    totals = responses + rng.integers(1, 30, n)
    masks = [(rng.random(length) < 0.7).astype(np.int32) for length in responses]
    values = rng.normal(1.0, 2.0, int(responses.sum()))
    values[np.concatenate(masks) == 0] = rng.choice([np.nan, np.inf, -np.inf, 1e300])
    return totals, responses, masks, values, rng.integers(0, 3, n)


@pytest.mark.parametrize("num_batches", [1_000, pytest.param(10_000, marks=pytest.mark.fuzz)])
def test_the_sum_over_context_parallel_ranks_is_the_plain_value(num_batches: int) -> None:
    rng = np.random.default_rng(num_batches)
    worst = 0.0
    for k in range(num_batches):
        totals, responses, masks, values, ids = _random_batch(rng)
        aggregation = AGGREGATIONS[k % len(AGGREGATIONS)]
        denominators = loss_denominators(aggregation, masks, rollout_ids=ids, group_ids=ids)
        cp_size, layout = (2, 3, 4, 8)[k % 100 // 32], LAYOUTS[k % 2]
        total = 0.0
        for rank in range(cp_size):
            cp = ContextParallel(cp_size, rank, layout)
            reduce = loss_reducer(
                aggregation, totals, responses, masks, denominators=denominators, cp=cp
            )
            total += reduce(
                torch.from_numpy(values[packed_responses(totals, responses, cp).flat_indices])
            ).item()
        plain = reference.loss_reducer(
            aggregation, totals, responses, masks, denominators=denominators
        )(values)
        scale = max(float(np.abs(values[np.concatenate(masks) != 0]).sum()), 1.0)
        worst = max(worst, abs(total - float(plain)) / scale)
    print(f"largest difference over {num_batches} batches, relative to sum |x|: {worst:.1e}")
    assert worst <= 1e-14


@given(
    seed=st.integers(0, 2**32 - 1),
    aggregation=st.sampled_from(AGGREGATIONS),
    num_parts=st.integers(1, 5),
)
def test_any_split_into_micro_batches_gives_the_whole_steps_value(
    seed: int, aggregation: Aggregation, num_parts: int
) -> None:
    scenario = make_scenario(seed, num_rollouts=4, max_response=12)
    rng = np.random.default_rng(seed)
    part = rng.integers(0, num_parts, scenario.num_samples)
    denominators, units = scenario.denominators(aggregation), scenario.step_units(aggregation)
    total = 0.0
    for k in range(num_parts):
        mine = np.flatnonzero(part == k)
        reduce = loss_reducer(
            aggregation,
            [scenario.total_lengths[i] for i in mine],
            [scenario.response_lengths[i] for i in mine],
            [scenario.loss_masks[i] for i in mine],
            denominators=denominators[mine],
        )
        x = np.concatenate([np.empty(0), *(scenario.values[i] for i in mine)])
        total += reduce(torch.from_numpy(x)).item()
    assert total / units == pytest.approx(scenario.expected_value(aggregation), rel=1e-12)


@given(seed=st.integers(0, 2**32 - 1), aggregation=st.sampled_from(AGGREGATIONS))
def test_the_reference_reducer_and_the_whole_step_reference_agree(
    seed: int, aggregation: Aggregation
) -> None:
    scenario = make_scenario(seed, num_rollouts=4, max_response=12)
    ids = {"rollout_ids": scenario.rollout_ids, "group_ids": scenario.group_ids}
    units = count_step_units(aggregation, scenario.loss_masks, **ids, constant=CONSTANT)
    denominators = scenario.denominators(aggregation)
    reduce = reference.loss_reducer(
        aggregation,
        scenario.total_lengths,
        scenario.response_lengths,
        scenario.loss_masks,
        denominators=denominators,
    )
    x = np.concatenate(scenario.values)
    assert float(reduce(x)) / units == pytest.approx(
        scenario.expected_value(aggregation), rel=1e-12
    )


@given(seed=st.integers(0, 2**32 - 1), aggregation=st.sampled_from(AGGREGATIONS))
def test_adding_a_masked_token_with_any_value_changes_nothing(
    seed: int, aggregation: Aggregation
) -> None:
    rng = np.random.default_rng(seed)
    responses = rng.integers(1, 9, 3)
    masks = [np.ones(length, np.int32) for length in responses]
    values = [rng.normal(size=length) for length in responses]
    longer = [np.append(mask, np.int32(0)) for mask in masks]
    noisy = [np.append(value, np.nan) for value in values]
    ids: dict[str, Any] = {"rollout_ids": [0, 0, 1], "group_ids": [0, 1, 1], "constant": 5.0}
    assert reference.aggregate(aggregation, noisy, longer, **ids) == reference.aggregate(
        aggregation, values, masks, **ids
    )


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 39)), min_size=1, max_size=5),
    cp_size=st.integers(1, 5),
    layout=st.sampled_from(LAYOUTS),
)
def test_response_slices_of_all_ranks_partition_the_response(
    lengths: list[tuple[int, int]], cp_size: int, layout: Layout
) -> None:
    shapes = [(total, response % total) for total, response in lengths]
    stream = -(-sum(total for total, _ in shapes) // cp_size) * cp_size
    offset = 0
    for total, response in shapes:
        full = torch.arange(response)
        pieces = [
            slice_response(
                full,
                total,
                response,
                ContextParallel(cp_size, rank, layout),
                stream_offset=offset,
                stream_length=stream,
            )
            for rank in range(cp_size)
        ]
        assert torch.equal(torch.cat(pieces).sort().values, full)
        offset += total


@given(
    totals=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    cp_size=st.integers(1, 5),
    width=st.integers(0, 3),
)
def test_token_slices_of_all_ranks_hold_every_token_once(
    totals: list[int], cp_size: int, width: int
) -> None:
    tokens = list(torch.split(torch.arange(sum(totals)), totals))
    if width:
        tokens = [token.unsqueeze(1).expand(-1, width) for token in tokens]
    for layout in LAYOUTS:
        local = torch.cat(
            [
                slice_tokens(tokens, ContextParallel(cp_size, rank, layout), pad_value=-1)
                for rank in range(cp_size)
            ]
        )
        column = local if not width else local[:, 0]
        assert torch.equal(column[column >= 0].sort().values, torch.arange(sum(totals)))
        assert local.shape[1:] == tokens[0].shape[1:]
