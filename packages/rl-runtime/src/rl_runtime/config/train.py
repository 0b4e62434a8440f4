"""`[train]`: batches and steps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["TrainSection"]


class TrainSection(Section):
    """How many batches are trained on, and how each is cut into steps and micro-batches."""

    num_batches: int = Field(default=30, ge=0)
    """Rollout batches of the run. 0: the run warms up, evaluates once and saves the model."""

    global_batch_size: int = Field(default=128, ge=1)
    """Rollouts of one optimizer step. Counted in rollouts, whatever the number of samples."""

    max_tokens_per_gpu: int = Field(default=4096, ge=1)
    """Tokens that one rank holds in one micro-batch; times `parallel.context` it is the token cap."""

    balance: Literal["none", "tokens", "flops"] = "flops"
    """What the planner balances over ranks and slots."""

    on_oversized: Literal["alone", "error", "drop"] = "alone"
    """What happens to a sample longer than the token cap."""

    on_trailing: Literal["drop", "partial_step", "error"] = "drop"
    """What happens to rollouts that do not fill a last step.

    drop: they are left out; a batch that lost so many rollouts that it does not fill one step is
    trained as one smaller step.
    """
