import numpy as np
import pytest

from rl_runtime.errors import RewardError
from rl_runtime.algorithms.advantages import spread_rewards


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
