"""Learning rates as pure functions of progress."""

from __future__ import annotations

from rl_runtime.config.recipe import Recipe
from rl_runtime.config.training import WarmStartSection

__all__ = ["reinforcement_lr", "sft_lr"]


def sft_lr(section: WarmStartSection, step: int) -> float:
    """Return the learning rate of step `step` (0-based) of the warm start.

    Linear up to `lr` over `warmup_steps`, then constant.
    """
    return section.lr * min(1.0, (step + 1) / max(section.warmup_steps, 1))


def reinforcement_lr(recipe: Recipe, batch_id: int) -> float:
    """Return the learning rate of batch `batch_id` (0-based).

    Linear up over `warmup_batches`, then linear down to `min_lr_fraction * lr` at the last batch.

    Example:
        lr 1, warmup_batches 2, min_lr_fraction 0.1, num_batches 5: 0.5, 1, 0.7, 0.4, 0.1.
    """
    section = recipe.optimizer
    if batch_id < section.warmup_batches:
        return section.lr * (batch_id + 1) / section.warmup_batches
    first = max(section.warmup_batches - 1, 0)
    span = max(recipe.train.num_batches - 1 - first, 1)
    return section.lr * (1 - (1 - section.min_lr_fraction) * (batch_id - first) / span)
