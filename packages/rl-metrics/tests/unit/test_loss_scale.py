"""The loss scale: worked numbers, and the cancellation behind it over exact fractions."""

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any, cast

import numpy as np
import pytest

from rl_metrics import (
    AGGREGATIONS,
    Aggregation,
    MetricsError,
    calculates_per_token_loss,
    ddp_loss_scale,
    fsdp_loss_scale,
    hf_trainer_loss_scale,
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


def test_a_mean_over_data_parallel_ranks_of_a_token_mean() -> None:
    # 10 trained tokens whose values add up to 17, 9 of it on rank 0 and 8 on rank 1.
    scale = ddp_loss_scale("token_mean", step_units=10, dp_size=2)
    assert scale == 0.2
    assert (scale * 9 + scale * 8) / 2 == pytest.approx(1.7, rel=1e-15)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("dp", "cp", "k"), [*product([1, 2, 4], [1, 2], [1, 8])])
def test_a_mean_over_ranks_and_accumulation_cancels_exactly(
    aggregation: Aggregation, dp: int, cp: int, k: int
) -> None:
    wide: dict[str, Any] = {"step_units": 16, "dp_size": dp, "cp_size": cp}
    scale = Fraction(ddp_loss_scale(aggregation, **wide, accumulation_steps=k))
    assert scale / k / (dp * cp) == Fraction(1, 16)
    scale = Fraction(fsdp_loss_scale(aggregation, **wide, accumulation_steps=k))
    assert scale / k / (dp * cp) == Fraction(1, 16)
    for divisor in (1, 0.5, 8):
        scale = Fraction(
            fsdp_loss_scale(
                aggregation, **wide, accumulation_steps=k, gradient_divide_factor=divisor
            )
        )
        assert scale / k / Fraction(divisor) == Fraction(1, 16)
    scale = Fraction(hf_trainer_loss_scale(aggregation, **wide, accumulation_steps=k))
    assert scale / k / (dp * cp) == Fraction(1, 16)
    scale = Fraction(
        hf_trainer_loss_scale(aggregation, **wide, accumulation_steps=k, hook="compute_loss_func")
    )
    assert scale * (dp * cp) / (dp * cp) == Fraction(1, 16)


ALL_SCALES: list[Callable[..., float]] = [ddp_loss_scale, fsdp_loss_scale, hf_trainer_loss_scale]


@pytest.mark.parametrize("scale", ALL_SCALES)
def test_a_step_without_trained_tokens_has_a_finite_factor(scale: Callable[..., float]) -> None:
    for none in (0, 0.0):
        assert scale("token_mean", step_units=none, dp_size=2, accumulation_steps=1) == 2.0
    with pytest.raises(MetricsError, match="rollout_mean needs a positive number"):
        scale("rollout_mean", step_units=0, dp_size=2, accumulation_steps=1)


@pytest.mark.parametrize("scale", ALL_SCALES)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_units": None}, "token_mean needs a positive number: trained tokens of the whole"),
        ({"step_units": float("nan")}, "needs a positive number"),
        ({"step_units": -1}, "needs a positive number"),
        ({"dp_size": 0}, "dp_size is 0"),
        ({"cp_size": 1.5}, "cp_size is 1.5"),
        ({"accumulation_steps": 0}, "accumulation_steps is 0"),
        ({"accumulation_steps": True}, "accumulation_steps is True"),
    ],
)
def test_sizes_of_every_trainer_are_counts(
    scale: Callable[..., float], settings: dict[str, Any], message: str
) -> None:
    given = {"step_units": 1, "dp_size": 1, "cp_size": 1, "accumulation_steps": 1} | settings
    with pytest.raises(MetricsError, match=message):
        scale("token_mean", **given)


@pytest.mark.parametrize("divisor", [0, -1, float("nan"), float("inf"), "2"])
def test_a_divide_factor_is_a_positive_number(divisor: Any) -> None:
    with pytest.raises(MetricsError, match="gradient_divide_factor"):
        fsdp_loss_scale("token_mean", step_units=1, dp_size=1, gradient_divide_factor=divisor)


def test_an_unknown_hook_is_refused() -> None:
    hook: Any = "loss"
    with pytest.raises(MetricsError, match="hook is 'loss'; use one of compute_loss, compute_loss"):
        hf_trainer_loss_scale(
            "token_mean", step_units=1, dp_size=1, accumulation_steps=1, hook=hook
        )


@pytest.mark.parametrize("hook", [np.ones(2), ["compute_loss"], None, 1])
def test_a_hook_that_is_no_text_is_refused(hook: Any) -> None:
    with pytest.raises(MetricsError, match="use one of compute_loss"):
        hf_trainer_loss_scale(
            "sample_mean", step_units=1, dp_size=1, accumulation_steps=1, hook=hook
        )


@pytest.mark.parametrize(
    "scale",
    [
        lambda: ddp_loss_scale("sample_mean", step_units=1e-320, dp_size=8),
        lambda: megatron_loss_scale(
            "sample_mean", step_units=1e-320, num_microbatches=1, dp_size=8, cp_size=1
        ),
        lambda: fsdp_loss_scale(
            "sample_mean", step_units=0.001, dp_size=8, gradient_divide_factor=1e308
        ),
        lambda: fsdp_loss_scale(
            "sample_mean", step_units=1e300, dp_size=8, gradient_divide_factor=1e-300
        ),
        lambda: hf_trainer_loss_scale(
            "sample_mean",
            step_units=1e-320,
            dp_size=1,
            accumulation_steps=1,
            hook="compute_loss_func",
        ),
    ],
)
def test_a_factor_beyond_float64_is_refused(scale: Callable[[], float]) -> None:
    with pytest.raises(MetricsError, match="beyond float64; check step_units"):
        scale()
