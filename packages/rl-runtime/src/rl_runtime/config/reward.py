"""`[reward]`: how responses are scored."""

from __future__ import annotations

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["RewardSection"]


class RewardSection(Section):
    """How responses are scored."""

    function: str = "rl_runtime.rollout.reward:verifier_reward"
    """Import path `module:function` of the reward, called once per rollout, with its last sample."""

    timeout_seconds: float = Field(default=30.0, gt=0)
    """How long one call may take, in seconds.

    A reward that is late or fails drops its rollout, with a warning.
    """
