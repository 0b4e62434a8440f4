"""Advantages of response tokens: rewards relative to a prompt group, and their way to the tokens.

GRPO and Dr. GRPO give every token of a response its rollout's group-normalised reward (Shao et al.
2024, "DeepSeekMath", section 4.1.2; Liu et al. 2025, "Understanding R1-Zero-Like Training", section
3). Rewards are normalised on the rollout side, because a prompt group may be spread over ranks, and
by id, never by position, so groups and fan-outs of any size are normal.

Axes: N samples, R rollouts, G prompt groups.

Invariants: a rollout counts once, however many samples it has, and they share its advantage; a
group of one rollout, or one without spread, gives 0; masked tokens carry an advantage too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_dump import RaggedArray
from rl_runtime.config.algorithm import AlgorithmSection
from rl_runtime.errors import RewardError

__all__ = ["divides_by_std", "normalise_group_rewards", "spread_rewards"]

_STD_EPS = 1e-6
"""Added to the standard deviation, as in GRPO implementations.

A group whose spread is below it counts as without spread.
"""


def divides_by_std(algorithm: AlgorithmSection) -> bool:
    """Tell whether centred rewards are divided by their group's deviation: GRPO does so."""
    return algorithm.name == "grpo"


def normalise_group_rewards(
    rewards: npt.NDArray[np.float64],
    rollout_ids: npt.NDArray[np.int64],
    group_ids: npt.NDArray[np.int64],
    *,
    divide_by_std: bool,
) -> npt.NDArray[np.float64]:
    """Subtract the group's mean reward and, if asked, divide by its standard deviation.

    A_i = (r_i - mean(r)) / (std(r) + 1e-6) over the rollouts of one prompt group, std with n - 1
    (Shao et al. 2024, DeepSeekMath, section 4.1.2); without the division it is Dr. GRPO (Liu et al.
    2025, section 3).

    Args:
        rewards: float64 [N], one per sample; equal among the samples of a rollout.
        rollout_ids: int64 [N].
        group_ids: int64 [N].
        divide_by_std: whether to divide.

    Returns:
        float64 [N].

    Raises:
        RewardError: samples of one rollout carry different rewards or groups; the message names the
            rollout.

    Example:
        One group with rewards 1 and 0: mean 0.5, std sqrt(0.5) = 0.7071, values 0.7071 and -0.7071.
    """
    # By rollout: `first` [R] is its first sample, `rollout_N` the rollout of each sample.
    _, first, rollout_N = np.unique(rollout_ids, return_index=True, return_inverse=True)
    reward_R, group_id_R = rewards[first], group_ids[first]
    differing = np.flatnonzero(
        (rewards != reward_R[rollout_N]) | (group_ids != group_id_R[rollout_N])
    )
    if differing.size:
        rollout = int(rollout_ids[differing[0]])
        values = rewards[rollout_ids == rollout].tolist()
        raise RewardError(
            f"rollout {rollout}: its samples carry rewards {values} in groups"
            f" {sorted(set(group_ids[rollout_ids == rollout].tolist()))}; both must be one"
        )
    group_R = np.unique(group_id_R, return_inverse=True)[1]
    count_G = np.bincount(group_R)
    # A weighted count is a sum by group.
    mean_G = np.bincount(group_R, weights=reward_R) / count_G
    centred_R = reward_R - mean_G[group_R]
    if divide_by_std:
        # max(n - 1, 1): a group of one has no spread, and gives 0 below.
        std_G = np.sqrt(np.bincount(group_R, weights=centred_R**2) / np.maximum(count_G - 1, 1))
        std_R = std_G[group_R]
        centred_R = np.where(std_R < _STD_EPS, 0.0, centred_R / (std_R + _STD_EPS))
    return np.asarray(centred_R[rollout_N], np.float64)


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
