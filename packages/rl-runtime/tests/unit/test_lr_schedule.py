"""Learning rates: worked numbers."""

import pytest

from rl_runtime.config import Recipe
from rl_runtime.config.training import WarmStartSection
from rl_runtime.training.lr_schedule import reinforcement_lr, sft_lr


def recipe(**optimizer: float) -> Recipe:
    return Recipe.model_validate(
        {"optimizer": {"lr": 1.0, **optimizer}, "train": {"num_batches": 5}}
    )


def test_warm_up_then_linear_decay() -> None:
    lrs = [
        reinforcement_lr(recipe(warmup_batches=2, min_lr_fraction=0.1), batch) for batch in range(5)
    ]
    assert lrs == pytest.approx([0.5, 1.0, 0.7, 0.4, 0.1])


def test_no_warm_up_starts_at_the_peak() -> None:
    assert [
        reinforcement_lr(recipe(warmup_batches=0, min_lr_fraction=0.0), batch) for batch in (0, 4)
    ] == pytest.approx([1.0, 0.0])


def test_the_rate_of_the_warm_start_rises_linearly_then_stays() -> None:
    section = WarmStartSection(lr=2.0, warmup_steps=4)
    assert [sft_lr(section, step) for step in (0, 3, 50)] == [0.5, 2.0, 2.0]
