"""`[rollout]`: what is sampled for one batch, and how."""

from __future__ import annotations

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["RolloutSection"]


class RolloutSection(Section):
    """What is sampled for one batch, and how."""

    prompts_per_batch: int = Field(default=64, ge=1)
    """Prompts of one rollout batch."""

    rollouts_per_prompt: int = Field(default=8, ge=1)
    """Rollouts of one prompt: the size of its group."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature. Log-probs are taken at this temperature on both sides."""

    top_p: float = Field(default=0.9, gt=0, le=1)
    """Nucleus mass. 1: no nucleus filter."""

    top_k: int = Field(default=-1, ge=-1)
    """Number of most likely ids kept. -1: all."""

    min_p: float = Field(default=0.0, ge=0, le=1)
    """Ids below this fraction of the largest probability are cut. 0: none."""

    max_response_tokens: int = Field(default=8, ge=1)
    """Longest response, in tokens."""

    stop: tuple[str, ...] = ()
    """Strings that end a response, beside the tokenizer's end-of-sequence id."""

    replay: bool = True
    """Train on the recorded kept sets.

    Off: log-probs are normalised over the whole vocabulary in training.
    """

    generate: str = ""
    """Import path `module:function` of a custom generate hook. Empty: one sample per rollout."""

    rollout_deadline_seconds: float = Field(default=300.0, gt=0)
    """How long the generation of one batch may take, in seconds."""
