"""Scores of responses: the task's own verifier, guarded, and exact match.

Invariants: a reward is a finite number; a reward function that fails or is late raises
`RewardError` with the rollout's id, and never ends a run by itself.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial
from typing import Any

from rl_runtime.errors import RewardError
from rl_runtime.records import Rollout, Sample
from rl_runtime.rollout.hooks import RewardHook

__all__ = ["Scorer", "exact_match", "guarded_score", "label_reward", "verifier_reward"]

_CONCURRENCY = 32
"""Reward calls at a time.

More would only contend for Python's lock, or for whatever they call over the network.
"""


def exact_match(response: str, label: str) -> float:
    """Return 1.0 where response and label differ at most in case and outer space, else 0.0."""
    return float(response.strip().casefold() == label.strip().casefold())


def guarded_score(score: float, *, response: str, label: str, finished: bool) -> float:
    """Close the two holes of verifiers that give credit per position.

    reasoning-gym's spell_backward pays almost full marks for the right answer with any suffix, so
    an answer longer than the label scores 0; an answer without an end scores 0, since otherwise
    rambling costs nothing. The rest is clamped to [0, 1].

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
    """Score a reasoning-gym entry by its own verifier and `guarded_score`, and by exact match."""
    entry = dict(sample.metadata)
    score = float(
        _verifier(str(entry["metadata"]["source_dataset"]))(answer=sample.response, entry=entry)
    )
    finished = sample.finish_reason == "stop"
    return {
        "reward": guarded_score(
            score, response=sample.response, label=sample.label, finished=finished
        ),
        "exact_match": exact_match(sample.response, sample.label) * finished,
    }


@cache
def _verifier(task: str) -> Callable[..., float]:
    # Once: some tasks read a word list for it, which costs more than scoring a batch.
    import reasoning_gym

    verifier: Callable[..., float] = reasoning_gym.get_score_answer_fn(task)
    return verifier


def label_reward(sample: Sample) -> Mapping[str, float]:
    """Score by exact match with the label; for prompts from files."""
    score = exact_match(sample.response, sample.label)
    return {"reward": score, "exact_match": score}


class Scorer:
    """The caller of a reward function: in threads, so many at a time, from one event loop.

    Each call has a thread of its own: one that hangs cannot be stopped, and in a shared pool the
    next calls would wait for it in vain.
    """

    def __init__(
        self, hook: RewardHook, *, timeout_seconds: float, concurrency: int = _CONCURRENCY
    ) -> None:
        """Remember what to call.

        Args:
            hook: the reward function.
            timeout_seconds: how long one call may take, in seconds, without the wait for its turn.
            concurrency: calls at a time; one that is late no longer counts.
        """
        self._hook = hook
        self._timeout_seconds = timeout_seconds
        self._turns = asyncio.Semaphore(concurrency)

    async def score(self, rollout: Rollout) -> Rollout:
        """Give every sample of a rollout the reward of its last sample.

        Rewards that the generate hook has set stay.

        Args:
            rollout: one rollout.

        Returns:
            The rollout with rewards.

        Raises:
            RewardError: the hook raised, was late, or gave no finite number; the message names the
                rollout.
        """
        rewards = {sample.reward for sample in rollout.samples}
        where = f"rollout {rollout.rollout_id} (group {rollout.group_id})"
        if rewards == {None}:
            given = await self._call(rollout.samples[-1], where)
        elif len(rewards) == 1:
            given = rewards.pop()
        else:
            raise RewardError(
                f"{where}: its samples carry different rewards {sorted(map(str, rewards))}:"
                " siblings of a rollout share one reward"
            )
        scores = _numbers(given, where)
        reward = scores.pop("reward")
        samples = tuple(
            replace(sample, reward=reward, scores={**sample.scores, **scores})
            for sample in rollout.samples
        )
        return replace(rollout, samples=samples)

    async def _call(self, sample: Sample, where: str) -> object:
        try:
            async with self._turns:
                return await asyncio.wait_for(
                    _in_own_thread(partial(self._hook, sample)), self._timeout_seconds
                )
        except TimeoutError as error:
            raise RewardError(
                f"{where}: the reward function took longer than reward.timeout_seconds ="
                f" {self._timeout_seconds}"
            ) from error
        except Exception as error:
            raise RewardError(
                f"{where}: the reward function raised {type(error).__name__}: {error}"
            ) from error


def _in_own_thread(call: Callable[[], object]) -> asyncio.Future[object]:
    """Run a call in a daemon thread, which ends with the process however long the call takes."""
    result: Future[object] = Future()
    # From here on a caller that gives up cannot cancel it: the thread sets it, late or not.
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            # A StopIteration cannot be set on asyncio's future, and an exit of the thread must not
            # be one of the run.
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            result.set_exception(error if is_plain else RuntimeError(repr(error)))

    threading.Thread(target=run, name="reward", daemon=True).start()
    return asyncio.wrap_future(result)


def _numbers(given: object, where: str) -> dict[str, float]:
    """Check what a reward function gave: a finite reward, and numbers beside it."""
    scores: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else {"reward": given}
    try:
        numbers = {str(name): float(value) for name, value in scores.items()}
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{where}: the reward function gave {given!r}: return a finite number, or a mapping of"
            " numbers with the key 'reward'"
        ) from error
    if not math.isfinite(numbers.get("reward", math.nan)):
        raise RewardError(
            f"{where}: the reward is {scores.get('reward')!r}: return a finite number, or a mapping"
            " with the key 'reward'"
        )
    return numbers
