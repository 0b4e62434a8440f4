"""`[warm_start]`: supervised fine-tuning before the first batch."""

from __future__ import annotations

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["WarmStartSection"]


class WarmStartSection(Section):
    """Supervised fine-tuning of the small model through the same trainers, skipped when `model.path` is set."""

    steps: int = Field(default=60, ge=0)
    """Most optimizer steps."""

    stop_at_reward: float = Field(default=0.55, ge=0, le=1)
    """Stop as soon as the held-out reward reaches this value. 1: run all steps."""

    first_check: int = Field(default=30, ge=0)
    """Steps before the held-out reward is looked at for the first time."""

    check_interval: int = Field(default=3, ge=1)
    """Steps between two looks."""

    check_samples: int = Field(default=128, ge=1)
    """Held-out prompts of one look. They are not those of `[eval]`."""

    batch_size: int = Field(default=64, ge=1)
    """Examples of one step."""

    lr: float = Field(default=2e-3, gt=0)
    """Learning rate after the warm-up."""

    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the learning rate rises linearly."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
