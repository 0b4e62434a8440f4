"""Rewards: the guards, and what a bad reward function does."""

import asyncio
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl_runtime.errors import RewardError
from rl_runtime.records import Rollout, Sample
from rl_runtime.rollout.hooks import RewardHook
from rl_runtime.rollout.reward import Scorer, exact_match, guarded_score, verifier_reward


def make_rollout(count: int = 1, **changes: Any) -> Rollout:
    sample = Sample(
        rollout_id=3,
        group_id=1,
        sample_index=0,
        prompt_tokens=np.array([1]),
        response_tokens=np.array([2]),
        loss_mask=np.ones(1, np.int32),
        rollout_log_probs=np.zeros(1, np.float32),
        weight_versions=np.zeros(1, np.int64),
        response="tac",
        label="tac",
    )
    return Rollout(
        rollout_id=3, group_id=1, samples=tuple(replace(sample, **changes) for _ in range(count))
    )


def score(rollout: Rollout, hook: RewardHook, timeout: float = 5.0) -> Rollout:
    return asyncio.run(Scorer(hook, timeout_seconds=timeout).score(rollout))


def test_an_answer_longer_than_the_label_scores_nothing() -> None:
    assert guarded_score(0.9999999, response="tacx", label="tac", finished=True) == 0.0


def test_an_answer_without_an_end_scores_nothing() -> None:
    assert guarded_score(1.0, response="tac", label="tac", finished=False) == 0.0


def test_a_score_above_one_is_clamped() -> None:
    assert guarded_score(1.0000000000000002, response="tac", label="tac", finished=True) == 1.0


def test_exact_match_ignores_case_and_outer_space() -> None:
    assert exact_match(" TaC\n", "tac") == 1.0
    assert exact_match("ta", "tac") == 0.0


def test_siblings_share_the_reward_of_the_last_sample() -> None:
    scored = score(make_rollout(3), lambda sample: {"reward": 0.25, "exact_match": 1})
    assert [sample.reward for sample in scored.samples] == [0.25] * 3
    assert scored.samples[0].scores == {"exact_match": 1.0}


def test_a_reward_that_the_generate_hook_set_is_kept() -> None:
    assert score(make_rollout(2, reward=0.5), lambda sample: 1 / 0).samples[0].reward == 0.5


def late(sample: Sample) -> float:
    time.sleep(0.3)
    return 1.0


@pytest.mark.parametrize(
    ("hook", "mentions"),
    [
        (lambda sample: 1 / 0, "ZeroDivisionError"),
        (lambda sample: float("nan"), "nan"),
        (lambda sample: {"score": 1.0}, "'reward'"),
        (late, "reward.timeout_seconds"),
        (lambda sample: None, "None"),
        (lambda sample: "good", "'good'"),
        (lambda sample: [1.0], "[1.0]"),
        (lambda sample: {"reward": 1.0, "note": "good"}, "'good'"),
        (lambda sample: next(iter(())), "StopIteration"),
        (lambda sample: sys.exit(3), "SystemExit"),
    ],
    ids=[
        "raises",
        "nan",
        "no reward key",
        "late",
        "nothing",
        "text",
        "list",
        "a score that is text",
        "StopIteration",
        "exits",
    ],
)
def test_a_bad_reward_function_is_an_error_that_names_the_rollout(
    hook: RewardHook, mentions: str
) -> None:
    with pytest.raises(RewardError, match="rollout 3") as caught:
        score(make_rollout(), hook, timeout=0.1)
    assert mentions in str(caught.value)


def test_calls_that_hang_do_not_keep_others_from_their_turn() -> None:
    """Twice as many hanging calls as there are turns, and one good call after them."""
    never = threading.Event()

    def hook(sample: Sample) -> float:
        return never.wait(30) if sample.response == "hang" else 1.0

    async def all_of_them() -> list[Rollout | BaseException]:
        scorer = Scorer(hook, timeout_seconds=0.2, concurrency=2)
        calls = [scorer.score(make_rollout(response="hang")) for _ in range(4)] + [
            scorer.score(make_rollout())
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    *late, good = asyncio.run(all_of_them())
    never.set()
    assert [type(result) for result in late] == [RewardError] * 4
    assert isinstance(good, Rollout)
    assert good.samples[0].reward == 1.0


def test_the_verifier_pays_for_the_reversed_word_and_not_for_a_suffix() -> None:
    pytest.importorskip("reasoning_gym")
    entry = {
        "question": "",
        "answer": "tac",
        "metadata": {"source_dataset": "spell_backward", "word": "cat"},
    }
    right, long, half = (
        score(make_rollout(response=text, metadata=entry), verifier_reward).samples[0]
        for text in ("tac", "tacxyz", "tax")
    )
    assert (right.reward, right.scores["exact_match"]) == (1.0, 1.0)
    assert (long.reward, long.scores["exact_match"]) == (0.0, 0.0)
    assert half.reward is not None
    assert 0 < half.reward < 1
