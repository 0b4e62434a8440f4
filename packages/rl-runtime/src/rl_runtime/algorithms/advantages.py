"""Advantages of response tokens.

GRPO and Dr. GRPO give every token of a response its rollout's group-normalised reward (Shao et al.
2024, "DeepSeekMath", section 4.1.2; Liu et al. 2025, "Understanding R1-Zero-Like Training", section
3). The rewards arrive normalised: where and by what is decided on the rollout side, because a
prompt group may be spread over ranks.

Invariants: siblings of a rollout share its advantage; masked tokens carry it too, and the loss mask
keeps them out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_dump import RaggedArray
from rl_runtime.errors import RewardError

__all__ = ["spread_rewards"]


def spread_rewards(
    rewards: npt.NDArray[np.float64], response_lengths: npt.NDArray[np.int64]
) -> RaggedArray:
    """Give each response token its sample's normalised reward: A_it = r_i.

    Args:
        rewards: float64 [n], normalised by prompt group.
        response_lengths: int64 [n], tokens.

    Returns:
        float32 advantages, one array [R] per sample. Rewards [1.5, -0.5] of responses of 2 and 1
        tokens give [1.5, 1.5] and [-0.5].

    Raises:
        RewardError: a reward is not finite; the message names the sample.
    """
    broken = np.flatnonzero(~np.isfinite(rewards))
    if broken.size:
        raise RewardError(
            f"samples {broken[:8].tolist()} of this rank have rewards"
            f" {rewards[broken[:8]].tolist()}: a reward must be a finite number"
        )
    offsets = np.concatenate([[0], np.cumsum(response_lengths)])
    return RaggedArray(np.repeat(rewards, response_lengths).astype(np.float32), offsets)
