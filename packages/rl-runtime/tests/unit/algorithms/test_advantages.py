"""Group-normalised rewards, and their way to the tokens: worked numbers and laws."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from rl_runtime.algorithms.advantages import normalise_group_rewards, spread_rewards
from rl_runtime.errors import RewardError


def normalise(
    rewards: Sequence[float],
    rollouts: Sequence[int],
    groups: Sequence[int],
    *,
    divide_by_std: bool = True,
) -> npt.NDArray[np.float64]:
    return normalise_group_rewards(
        np.array(rewards, np.float64),
        np.array(rollouts, np.int64),
        np.array(groups, np.int64),
        divide_by_std=divide_by_std,
    )


def test_two_rollouts_are_divided_by_the_sample_standard_deviation() -> None:
    # mean 0.5, std sqrt(0.5) = 0.70711; 0.5 / (0.70711 + 1e-6) = 0.707106
    np.testing.assert_allclose(normalise([1, 0], [0, 1], [5, 5]), [0.707106, -0.707106], atol=1e-6)


def test_a_rollout_counts_once_however_many_siblings_it_has() -> None:
    alone = normalise([1, 0, 0], [0, 1, 2], [0, 0, 0])
    fanned = normalise([1, 1, 1, 0, 0], [0, 0, 0, 1, 2], [0, 0, 0, 0, 0])
    np.testing.assert_allclose(fanned, [alone[0]] * 3 + list(alone[1:]))


def test_groups_are_found_by_id_not_by_position() -> None:
    np.testing.assert_allclose(
        normalise([1, 4, 3, 2], [0, 1, 2, 3], [0, 1, 0, 1], divide_by_std=False), [-1, 1, 1, -1]
    )


def test_a_single_rollout_and_a_group_without_spread_give_zero() -> None:
    np.testing.assert_array_equal(normalise([0.3, 0.7, 0.7], [0, 1, 2], [0, 1, 1]), [0, 0, 0])


def test_equal_rewards_that_do_not_add_up_exactly_still_give_zero() -> None:
    np.testing.assert_array_equal(normalise([0.1] * 3, [0, 1, 2], [0, 0, 0]), [0, 0, 0])


@pytest.mark.parametrize(("rewards", "groups"), [([1, 0, 1], [0, 0, 0]), ([1, 1, 1], [0, 1, 0])])
def test_siblings_that_disagree_are_refused_by_rollout(
    rewards: list[float], groups: list[int]
) -> None:
    with pytest.raises(RewardError, match="rollout 7"):
        normalise(rewards, [7, 7, 8], groups)


def test_every_token_of_a_response_carries_its_reward() -> None:
    advantages = spread_rewards(np.array([1.5, -0.5]), np.array([2, 1]))
    assert [advantages[0].tolist(), advantages[1].tolist()] == [[1.5, 1.5], [-0.5]]
    assert advantages.dtype == np.float32


def test_no_samples_give_no_advantages() -> None:
    assert len(spread_rewards(np.zeros(0), np.zeros(0, np.int64))) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_no_number_is_named(bad: float) -> None:
    with pytest.raises(RewardError, match=r"samples \[1\]"):
        spread_rewards(np.array([0.0, bad]), np.array([2, 1]))
