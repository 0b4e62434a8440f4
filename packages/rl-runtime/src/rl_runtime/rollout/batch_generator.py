"""Generates batches of scored rollouts: prompts are played against the engines, then scored.

Invariants: one bad rollout never ends a run: it is tried again, then dropped and counted; a dead
engine always does; no wait is without a deadline; rollout ids never repeat within a run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import EngineError, GenerateError, RewardError
from rl_runtime.records import Prompt, PromptGroup, Rollout
from rl_runtime.rollout.data.source import DataSource, Tokenizer
from rl_runtime.rollout.generate import play_rollout, sampling_of, single_turn
from rl_runtime.rollout.hooks import (
    Engine,
    GenerateContext,
    GenerateHook,
    RewardHook,
    load_hook,
)
from rl_runtime.rollout.reward import Scorer

__all__ = ["BatchGenerator", "GeneratedBatch"]

_log = logging.getLogger(__name__)
_ATTEMPTS = 3
"""Times that one rollout is tried before it is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedBatch:
    """The outcome of one round of generation.

    Example: 64 groups of 8 rollouts, of which one failed three times: 64 groups, 511 rollouts,
    dropped_rollouts 1, seconds 1.2.
    """

    groups: tuple[PromptGroup, ...]
    """Scored rollouts by prompt; groups that lost all rollouts are left out."""
    dropped_rollouts: int
    """Rollouts that failed on every attempt or were late."""
    seconds: float
    """Wall time of generation and scoring."""


class BatchGenerator:
    """The source of scored rollouts, for training and for evaluation."""

    def __init__(
        self, recipe: Recipe, source: DataSource, tokenizer: Tokenizer, engines: Sequence[Engine]
    ) -> None:
        """Load the recipe's hooks; prompts are spread over `engines` in turn.

        Raises:
            ConfigError: a hook's import path is wrong.
        """
        self._recipe = recipe
        self._source = source
        self._tokenizer = tokenizer
        self._engines = tuple(engines)
        self._sampling = sampling_of(recipe.rollout)
        self._generate = cast(
            "GenerateHook",
            load_hook(recipe.rollout.generate) if recipe.rollout.generate else single_turn,
        )
        self._scorer = Scorer(
            cast("RewardHook", load_hook(recipe.reward.function)),
            timeout_seconds=recipe.reward.timeout_seconds,
        )
        self._next_rollout = 0
        self._last_failure = ""

    async def generate_batch(self) -> GeneratedBatch:
        """Generate and score the next batch of prompt groups.

        Raises:
            EngineError: an engine died or refused.
            GenerateError: no rollout of the batch succeeded; the message carries the last cause.
        """
        section = self._recipe.rollout
        prompts = self._source.next_prompts(section.prompts_per_batch)
        return await self._play(prompts, section.rollouts_per_prompt, self._generate)

    async def evaluate(self, split: Literal["check", "eval"], count: int) -> GeneratedBatch:
        """Answer held-out prompts once each, without a custom generate hook.

        The sampling settings are those of training.

        Args:
            split: "eval", or "check" for the early stopping of the warm start.
            count: prompts.
        """
        return await self._play(self._source.held_out(split, count), 1, single_turn)

    async def _play(
        self, prompts: Sequence[Prompt], per_prompt: int, hook: GenerateHook
    ) -> GeneratedBatch:
        start = time.perf_counter()
        self._last_failure = ""
        tasks = [
            [
                asyncio.create_task(self._one(prompt, self._take_rollout_id(), hook))
                for _ in range(per_prompt)
            ]
            for prompt in prompts
        ]
        flat = [task for group in tasks for task in group]
        try:
            await asyncio.wait(
                flat,
                timeout=self._recipe.rollout.rollout_deadline_seconds,
                return_when=asyncio.FIRST_EXCEPTION,
            )
            for task in flat:
                if task.done() and task.exception() is not None:
                    await task
        finally:
            late = [task for task in flat if not task.done()]
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if late:
            _log.warning(
                "%d rollouts were not done within rollout.rollout_deadline_seconds and are dropped",
                len(late),
            )
        results = [
            [None if task.cancelled() else task.result() for task in group] for group in tasks
        ]
        groups = tuple(
            PromptGroup(
                group_id=prompt.group_id,
                rollouts=tuple(rollout for rollout in group if rollout is not None),
            )
            for prompt, group in zip(prompts, results, strict=True)
            if any(rollout is not None for rollout in group)
        )
        dropped = sum(rollout is None for group in results for rollout in group)
        if not groups:
            raise GenerateError(
                f"all {dropped} rollouts of the batch failed or were late; the last cause is:"
                f" {self._last_failure or 'rollout.rollout_deadline_seconds'}"
            )
        return GeneratedBatch(
            groups=groups, dropped_rollouts=dropped, seconds=time.perf_counter() - start
        )

    async def _one(self, prompt: Prompt, rollout_id: int, hook: GenerateHook) -> Rollout | None:
        engine = self._engines[prompt.group_id % len(self._engines)]
        context = GenerateContext(engine=engine, rollout_id=rollout_id, decode=self._decode)
        played = await self._tried(
            partial(play_rollout, hook, context, prompt, self._sampling),
            f"rollout {rollout_id} (group {prompt.group_id})",
        )
        # What was sampled stays sampled: a response that its reward fails on must not be replaced
        # by one that it likes better.
        return (
            None
            if played is None
            else await self._tried(
                partial(self._scorer.score, played), f"scoring rollout {rollout_id}"
            )
        )

    async def _tried(self, call: Callable[[], Awaitable[Rollout]], what: str) -> Rollout | None:
        """Call up to three times; None when it failed each time."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await call()
            except EngineError:
                raise
            except Exception as error:
                known = isinstance(error, GenerateError | RewardError)
                _log.warning(
                    "attempt %d of %d: %s: %s: %s",
                    attempt,
                    _ATTEMPTS,
                    what,
                    type(error).__name__,
                    error,
                    exc_info=not known,
                )
                self._last_failure = f"{what}: {type(error).__name__}: {error}"
        return None

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _take_rollout_id(self) -> int:
        self._next_rollout += 1
        return self._next_rollout - 1
