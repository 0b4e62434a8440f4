"""Scores of responses: the task's own verifier, guarded, and exact match. Layer: rollout.

Invariants: a reward is a finite number; a reward function that fails or is late raises `RewardError` with the rollout's id, and never ends a run by itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import cast

from rl_runtime.errors import RewardError
from rl_runtime.records import Rollout, Sample
from rl_runtime.rollout.hooks import RewardHook

__all__ = ["exact_match", "guarded_score", "label_reward", "score_rollout", "verifier_reward"]


def exact_match(response: str, label: str) -> float:
    """1.0 where the response is the label, ignoring case and outer white space, else 0.0."""
    return float(response.strip().casefold() == label.strip().casefold())


def guarded_score(score: float, *, response: str, label: str, finished: bool) -> float:
    """Close the two holes of verifiers that give credit per position.

    reasoning-gym's spell_backward pays almost full marks for the right answer with any suffix, so an answer longer than the label scores 0;
    an answer without an end scores 0, since otherwise rambling costs nothing. The rest is clamped to [0, 1].

    Args:
        score: the verifier's score.
        response: what was answered.
        label: the right answer.
        finished: whether the response ended by itself.
    """
    if not finished or len(response.strip()) > len(label.strip()):
        return 0.0
    return min(max(score, 0.0), 1.0)


def verifier_reward(sample: Sample) -> Mapping[str, float]:
    """Score a reasoning-gym entry by its own verifier, guarded by `guarded_score`; exact match beside it."""
    entry = dict(sample.metadata)
    score = float(_verifier(str(entry["metadata"]["source_dataset"]))(answer=sample.response, entry=entry))
    finished = sample.finish_reason == "stop"
    return {
        "reward": guarded_score(score, response=sample.response, label=sample.label, finished=finished),
        "exact_match": exact_match(sample.response, sample.label) * finished,
    }


@cache
def _verifier(task: str) -> Callable[..., float]:
    """Make a task's verifier once: some tasks read a word list for it, which costs more than scoring a batch."""
    import reasoning_gym

    verifier: Callable[..., float] = reasoning_gym.get_score_answer_fn(task)
    return verifier


def label_reward(sample: Sample) -> Mapping[str, float]:
    """Score by exact match with the label; for prompts from files."""
    score = exact_match(sample.response, sample.label)
    return {"reward": score, "exact_match": score}


async def score_rollout(rollout: Rollout, hook: RewardHook, *, timeout_seconds: float) -> Rollout:
    """Give every sample of a rollout the reward of its last sample, unless the generate hook has set rewards itself.

    Args:
        rollout: one rollout.
        hook: the reward function; runs in a thread.
        timeout_seconds: how long it may take, in seconds.

    Returns:
        The rollout with rewards.

    Raises:
        RewardError: the hook raised, was late, or gave no finite number; the message names the rollout.
    """
    rewards = {sample.reward for sample in rollout.samples}
    where = f"rollout {rollout.rollout_id} (group {rollout.group_id})"
    if rewards == {None}:
        scores = await _call(hook, rollout.samples[-1], where, timeout_seconds)
    elif len(rewards) == 1:
        scores = {"reward": cast("float", rewards.pop())}
    else:
        msg = f"{where}: its samples carry different rewards {sorted(map(str, rewards))}: siblings of a rollout share one reward"
        raise RewardError(msg)
    reward = scores.get("reward")
    if reward is None or not math.isfinite(reward):
        msg = f"{where}: the reward is {reward!r}: return a finite number, or a mapping with the key 'reward'"
        raise RewardError(msg)
    extra = {name: float(value) for name, value in scores.items() if name != "reward"}
    samples = tuple(replace(sample, reward=float(reward), scores={**sample.scores, **extra}) for sample in rollout.samples)
    return replace(rollout, samples=samples)


async def _call(hook: RewardHook, sample: Sample, where: str, timeout_seconds: float) -> Mapping[str, float]:
    try:
        result = await asyncio.wait_for(asyncio.to_thread(partial(hook, sample)), timeout_seconds)
    except TimeoutError as error:
        msg = f"{where}: the reward function took longer than reward.timeout_seconds = {timeout_seconds}"
        raise RewardError(msg) from error
    except Exception as error:
        msg = f"{where}: the reward function raised {type(error).__name__}: {error}"
        raise RewardError(msg) from error
    return result if isinstance(result, Mapping) else {"reward": float(result)}
