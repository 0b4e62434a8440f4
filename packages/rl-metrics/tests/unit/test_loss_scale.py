"""The loss scale: worked numbers, and the cancellation behind it over exact fractions."""

from fractions import Fraction
from itertools import product
from typing import Any, cast

import pytest

from rl_metrics import (
    AGGREGATIONS,
    Aggregation,
    MetricsError,
    calculates_per_token_loss,
    megatron_loss_scale,
)

UNIT_MEANS = [aggregation for aggregation in AGGREGATIONS if aggregation != "token_mean"]


@pytest.mark.parametrize("aggregation", UNIT_MEANS)
def test_unit_means_undo_the_division_by_micro_batches_and_the_mean_over_ranks(
    aggregation: Aggregation,
) -> None:
    # 4 micro-batches on each of 2 x 2 ranks, 8 units: 4 * 4 / 8
    assert (
        megatron_loss_scale(aggregation, num_microbatches=4, step_units=8, dp_size=2, cp_size=2)
        == 2.0
    )


def test_token_mean_undoes_counting_each_token_on_every_context_parallel_rank() -> None:
    assert megatron_loss_scale("token_mean", num_microbatches=4, dp_size=8, cp_size=2) == 2.0


def test_only_token_mean_sets_megatrons_per_token_loss() -> None:
    assert [calculates_per_token_loss(aggregation) for aggregation in AGGREGATIONS] == [
        True,
        False,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(("dp", "cp", "k"), [*product([1, 2, 4], [1, 2, 4], [1, 2, 8])])
def test_the_factor_cancels_exactly_for_every_width(dp: int, cp: int, k: int) -> None:
    # With a gradient sum S of 1 the result must be 1 / units, whatever Megatron divides by on the
    # way.
    units = Fraction(16)
    scale = Fraction(
        megatron_loss_scale(
            "rollout_mean", num_microbatches=k, step_units=16, dp_size=dp, cp_size=cp
        )
    )
    assert scale / k / (dp * cp) == 1 / units
    trained_tokens = Fraction(40)
    scale = Fraction(megatron_loss_scale("token_mean", num_microbatches=k, dp_size=dp, cp_size=cp))
    counted_over_ranks = cp * trained_tokens
    assert scale / counted_over_ranks == 1 / trained_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"dp_size": 0}, "dp_size is 0"),
        ({"cp_size": -1}, "cp_size is -1"),
        ({"step_units": None}, "rollout_mean needs a positive number: rollouts of the whole step"),
        ({"step_units": 0}, "needs a positive number"),
        ({"step_units": float("nan")}, "needs a positive number"),
        ({"step_units": float("inf")}, "needs a positive number"),
        ({"step_units": "8"}, "step_units is str '8'; give one number"),
        (
            {"num_microbatches": 1.5},
            r"num_microbatches is 1.5 \(float\); give an integer of at least 1",
        ),
        ({"dp_size": 2.0}, r"dp_size is 2.0 \(float\)"),
        ({"cp_size": "2"}, r"cp_size is '2' \(str\)"),
        ({"cp_size": True}, r"cp_size is True \(bool\)"),
    ],
)
def test_sizes_that_are_no_counts_are_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "num_microbatches": 1,
        "step_units": 1,
        "dp_size": 1,
        "cp_size": 1,
    } | arguments
    with pytest.raises(MetricsError, match=message):
        megatron_loss_scale("rollout_mean", **given)


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(MetricsError, match="unknown loss aggregation"):
        megatron_loss_scale(
            cast("Any", "mean"), num_microbatches=1, step_units=1, dp_size=1, cp_size=1
        )
