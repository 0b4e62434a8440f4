"""From scored samples to rank batches: nothing is lost, weights are per rollout."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_dump import RaggedArray
from rl_runtime.batch import plan as plan_module
from rl_runtime.batch.columns import COLUMN_TYPES, batch_columns, column_problem
from rl_runtime.batch.plan import plan_batch
from rl_runtime.batch.rank_batch import Column
from rl_runtime.config import Recipe
from rl_runtime.errors import BatchMismatchError, GenerateError, RewardError
from rl_runtime.records import Sample
from rl_schedule import (
    SchedulePlan,
    ScheduleRequest,
    TokenCost,
    TransformerCost,
    plan_schedule,
)
from rl_topp import NucleusSet


def make_sample(
    rollout: int,
    group: int,
    prompt: int,
    response: int,
    *,
    reward: float | None = 1.0,
    mask: Sequence[int] | None = None,
) -> Sample:
    return Sample(
        rollout_id=rollout,
        group_id=group,
        sample_index=group,
        prompt_tokens=np.arange(prompt),
        response_tokens=np.arange(response),
        loss_mask=np.ones(response, np.int32) if mask is None else np.array(mask, np.int32),
        rollout_log_probs=np.zeros(response, np.float32),
        weight_versions=np.zeros(response, np.int64),
        nucleus=NucleusSet.from_lists([[token] for token in range(response)], vocab_size=64),
        reward=reward,
    )


def recipe(
    *,
    data: int = 2,
    gbs: int = 2,
    aggregation: str = "rollout_mean",
    cap: int = 64,
    trailing: str = "drop",
    context: int = 1,
    oversized: str = "alone",
) -> Recipe:
    return Recipe.model_validate(
        {
            "parallel": {"data": data, "context": context},
            "train": {
                "global_batch_size": gbs,
                "max_tokens_per_gpu": cap,
                "on_trailing": trailing,
                "on_oversized": oversized,
            },
            "algorithm": {"loss_aggregation": aggregation},
        }
    )


def per_sample(columns: Mapping[str, Column], name: str) -> npt.NDArray[Any]:
    """A column of one value per sample."""
    column = columns[name]
    assert isinstance(column, np.ndarray)
    return column


FOUR_ROLLOUTS = [
    make_sample(0, 0, 2, 3),
    make_sample(0, 0, 2, 1),
    make_sample(1, 0, 2, 2),
    make_sample(2, 1, 4, 5, mask=[1, 0, 0, 1, 1]),
    make_sample(3, 1, 4, 1),
]


@pytest.mark.parametrize(
    ("aggregation", "denominators", "units"),
    [
        ("rollout_mean", [4, 4, 2, 3, 1], [2, 2]),
        ("sample_mean", [3, 1, 2, 3, 1], [3, 2]),
        ("prompt_mean", [6, 6, 6, 4, 4], [1, 1]),
        ("token_mean", [1, 1, 1, 1, 1], [6, 4]),
    ],
)
def test_denominators_and_units_of_four_rollouts_in_two_steps(
    aggregation: str, denominators: list[int], units: list[int]
) -> None:
    result = plan_batch(
        batch_columns(FOUR_ROLLOUTS, divide_by_std=True),
        recipe(aggregation=aggregation),
        batch_id=0,
        cost=TokenCost(),
    )
    assert per_sample(result.columns, "loss_denominators").tolist() == denominators
    assert per_sample(result.columns, "step").tolist() == [0, 0, 0, 1, 1]
    assert result.rank_batches[0].step_units.tolist() == units


def test_a_prompt_group_that_is_spread_over_steps_counts_in_each_by_its_share() -> None:
    samples = [make_sample(rollout, 0, 2, 1 + rollout) for rollout in range(4)]
    result = plan_batch(
        batch_columns(samples, divide_by_std=True),
        recipe(aggregation="prompt_mean"),
        batch_id=0,
        cost=TokenCost(),
    )
    assert per_sample(result.columns, "loss_denominators").tolist() == [3, 3, 7, 7]
    assert result.rank_batches[0].step_units.tolist() == [1, 1]


def test_dropped_rollouts_have_step_minus_one_and_are_in_no_rank_batch() -> None:
    samples = [*FOUR_ROLLOUTS, make_sample(9, 2, 1, 1)]
    result = plan_batch(
        batch_columns(samples, divide_by_std=True), recipe(), batch_id=0, cost=TokenCost()
    )
    assert per_sample(result.columns, "step").tolist() == [0, 0, 0, 1, 1, -1]
    placed = np.concatenate(
        [per_sample(rank_batch.columns, "rollout_position") for rank_batch in result.rank_batches]
    )
    assert sorted(placed.tolist()) == [0, 1, 2, 3, 4]
    assert result.plan.dropped_rollouts == (9,)


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
        min_size=2,
        max_size=30,
    ),
    data=st.sampled_from([1, 2, 4]),
)
def test_every_sample_is_in_exactly_one_rank_batch_with_its_own_columns(
    shapes: list[tuple[int, int, int]], data: int
) -> None:
    samples = [
        make_sample(rollout, rollout // 2, prompt, response)
        for rollout, (siblings, prompt, response) in enumerate(shapes)
        for _ in range(siblings)
    ]
    columns = batch_columns(samples, divide_by_std=False)
    result = plan_batch(
        columns, recipe(data=data, trailing="partial_step"), batch_id=3, cost=TokenCost()
    )
    positions = np.concatenate(
        [per_sample(rank_batch.columns, "rollout_position") for rank_batch in result.rank_batches]
    )
    assert sorted(positions.tolist()) == list(range(len(samples)))
    for rank_batch in result.rank_batches:
        for local, position in enumerate(per_sample(rank_batch.columns, "rollout_position")):
            np.testing.assert_array_equal(
                rank_batch.columns["tokens"][local], columns["tokens"][int(position)]
            )
            assert rank_batch.columns["rollout_ids"][local] == samples[int(position)].rollout_id


def test_an_unscored_rollout_is_named() -> None:
    with pytest.raises(RewardError, match=r"\[1\]"):
        batch_columns(
            [make_sample(0, 0, 1, 1), make_sample(1, 0, 1, 1, reward=None)], divide_by_std=True
        )


def test_nuclei_for_some_samples_only_are_refused() -> None:
    samples = [make_sample(0, 0, 1, 1), replace(make_sample(5, 0, 1, 1), nucleus=None)]
    with pytest.raises(GenerateError, match=r"rollouts \[5\] have no kept sets"):
        batch_columns(samples, divide_by_std=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_mask": np.ones(2, np.int32)},
        {"rollout_log_probs": np.zeros(4, np.float32)},
        {"weight_versions": np.zeros(0, np.int64)},
        {"nucleus": NucleusSet.from_lists([[1]], vocab_size=4)},
        {"response_tokens": np.zeros(0, np.int64)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_sample_with_arrays_of_unequal_length_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(GenerateError, match="sample of rollout 7"):
        replace(make_sample(7, 0, 1, 3), **changes)


def test_the_columns_have_the_dtypes_of_the_table_and_its_order() -> None:
    columns = batch_columns(FOUR_ROLLOUTS, divide_by_std=True)
    assert [name for name in COLUMN_TYPES if name in columns] == list(columns)
    assert [column_problem(name, column) for name, column in columns.items()] == [None] * len(
        columns
    )


def test_a_column_of_another_dtype_or_form_is_a_problem() -> None:
    masks = RaggedArray.from_list([[1]], np.int64)
    assert column_problem("loss_masks", masks) == "loss_masks has dtype int64, not int32"
    truncated = RaggedArray.from_list([[True]], np.bool_)
    assert column_problem("truncated", truncated) == "truncated must have one value per sample"
    assert "one array" in str(column_problem("tokens", np.zeros(1, np.int64)))


def test_a_plan_that_breaks_its_promises_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner is made to ignore the token cap: its plan must not reach a trainer."""

    def careless(request: ScheduleRequest) -> SchedulePlan:
        return plan_schedule(replace(request, max_tokens_per_gpu=1000))

    monkeypatch.setattr(plan_module, "plan_schedule", careless)
    columns = batch_columns(FOUR_ROLLOUTS, divide_by_std=True)
    with pytest.raises(BatchMismatchError, match="batch 7: the plan breaks its promises: "):
        plan_batch(columns, recipe(data=1, cap=9), batch_id=7, cost=TokenCost())


def test_a_micro_batch_holds_the_cap_with_the_padding_of_context_parallelism() -> None:
    """Four sequences of 5 tokens are 20, the cap of two ranks with 10 each.

    Padded to multiples of `2 * context = 4` they would be a stream of 32.
    """
    samples = [make_sample(rollout, rollout, 2, 3) for rollout in range(4)]
    planned = plan_batch(
        batch_columns(samples, divide_by_std=True),
        recipe(data=1, gbs=4, cap=10, context=2),
        batch_id=0,
        cost=TokenCost(),
    )
    (rank_batch,) = planned.rank_batches
    lengths = per_sample(rank_batch.columns, "total_lengths")
    streams = [
        int((-(-lengths[local] // 4) * 4).sum()) for local in rank_batch.plan.micro_batch_indices
    ]
    assert streams == [16, 16]


def test_work_is_levelled_by_the_cost_of_the_run_s_own_model() -> None:
    """Lengths [10, 6, 6, 6], one step on two ranks.

    By tokens the halves are 16 and 12. With attention alone a sample costs s^2, and 100 against
    `3 * 36 = 108` is the nearest, so the long one has a rank for itself.
    """
    samples = [
        make_sample(rollout, rollout, 2, size - 2) for rollout, size in enumerate((10, 6, 6, 6))
    ]
    columns = batch_columns(samples, divide_by_std=True)

    def of_rank_with_the_long_one(cost: TokenCost | TransformerCost) -> list[int]:
        planned = plan_batch(columns, recipe(gbs=4), batch_id=0, cost=cost)
        assert (
            planned.plan.settings["cost"]["kind"]
            == {
                TokenCost: "tokens",
                TransformerCost: "transformer",
            }[type(cost)]
        )
        lengths = [
            sorted(per_sample(rank_batch.columns, "total_lengths").tolist())
            for rank_batch in planned.rank_batches
        ]
        return next(rank for rank in lengths if 10 in rank)

    assert of_rank_with_the_long_one(TokenCost()) == [6, 10]
    assert of_rank_with_the_long_one(TransformerCost(token_flops=0, pair_flops=2)) == [10]


@pytest.mark.parametrize("extra", ["auto", 0])
def test_the_planner_gets_the_recipe_s_extra_micro_batches(extra: str | int) -> None:
    given = recipe()
    train = given.train.model_copy(update={"extra_micro_batches": extra})
    columns = batch_columns([make_sample(r, r, 2, 3) for r in range(2)], divide_by_std=True)
    planned = plan_batch(
        columns, given.model_copy(update={"train": train}), batch_id=0, cost=TokenCost()
    )
    assert planned.plan.settings["extra_micro_batches"] == extra


def test_the_first_rank_alone_carries_what_the_dump_says_of_the_whole_batch() -> None:
    """Rollout 9 is left over after two steps of two rollouts."""
    samples = [*FOUR_ROLLOUTS, replace(make_sample(9, 2, 1, 1, reward=0.25), sample_index=None)]
    first, second = plan_batch(
        batch_columns(samples, divide_by_std=True), recipe(), batch_id=0, cost=TokenCost()
    ).rank_batches
    assert second.whole_batch is None
    assert first.whole_batch is not None
    assert first.whole_batch["raw_reward"] == [1, 1, 1, 1, 1, 0.25]
    assert SchedulePlan.from_document(first.whole_batch["schedule"]).dropped_rollouts == (9,)
    assert first.whole_batch["dropped"] == [
        {
            "rollout_position": 5,
            "sample_index": None,
            "rollout_id": 9,
            "reason": "its rollout does not fill a step of 2 rollouts",
        }
    ]


def test_a_sample_over_the_cap_is_dropped_with_its_siblings_and_each_says_why() -> None:
    """Cap 8: of rollout 3 the sample of 4 + 9 tokens is too long, its sibling of 5 is not."""
    samples = [*FOUR_ROLLOUTS[:4], make_sample(3, 1, 4, 9), make_sample(3, 1, 4, 1)]
    samples[3] = make_sample(2, 1, 4, 4)
    planned = plan_batch(
        batch_columns(samples, divide_by_std=True),
        recipe(cap=8, gbs=3, oversized="drop"),
        batch_id=0,
        cost=TokenCost(),
    )
    whole_batch = planned.rank_batches[0].whole_batch
    assert whole_batch is not None
    assert {entry["rollout_position"]: entry["reason"] for entry in whole_batch["dropped"]} == {
        4: "longer than the 8 tokens that a micro-batch may hold",
        5: "a sample of its rollout is longer than the 8 tokens that a micro-batch may hold",
    }
