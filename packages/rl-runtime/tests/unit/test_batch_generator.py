"""Batches of rollouts: one bad rollout never ends a run, a dead engine always does."""

import asyncio
import itertools
import sys
import types
from typing import Any, Never, cast

import numpy as np
import numpy.typing as npt
import pytest

from rl_runtime.config import Recipe
from rl_runtime.engine.generation import Generation, Sampling
from rl_runtime.errors import EngineError, GenerateError
from rl_runtime.records import Prompt, Sample
from rl_runtime.rollout.batch_generator import BatchGenerator, GeneratedBatch
from rl_runtime.rollout.data.source import DataSource, Tokenizer
from rl_runtime.rollout.generate import single_turn
from rl_runtime.rollout.hooks import Engine, GenerateContext, GenerateHook


class CountingSource:
    """The calls that the generator makes of a data source."""

    def __init__(self) -> None:
        self.groups = itertools.count()

    def next_prompts(self, count: int) -> list[Prompt]:
        return [
            Prompt(
                group_id=(g := next(self.groups)),
                sample_index=g,
                text="",
                tokens=np.array([3]),
                label="7",
            )
            for _ in range(count)
        ]

    def held_out(self, split: str, count: int) -> list[Prompt]:
        return self.next_prompts(count)


class DigitTokenizer:
    """The call that the generator makes of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(str, token_ids))


class FixedEngine:
    async def generate(
        self, prompt_tokens: npt.NDArray[np.int64], sampling: Sampling
    ) -> Generation:
        await asyncio.sleep(0)
        return Generation(
            tokens=np.array([7]),
            full_log_probs=np.zeros(1, np.float32),
            nucleus_log_probs=np.zeros(1, np.float32),
            nucleus=None,
            finish_reason="stop",
            weight_version=1,
        )


class DeadEngine:
    async def generate(self, prompt_tokens: npt.NDArray[np.int64], sampling: Sampling) -> Never:
        raise EngineError("engine 0: exited with code -9")


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("hooks_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def generator(
    hook: GenerateHook | None = None,
    hooks: types.ModuleType | None = None,
    *,
    engine: Engine | None = None,
    prompts: int = 2,
    rollouts: int = 3,
    deadline: float = 30.0,
) -> BatchGenerator:
    recipe: dict[str, dict[str, Any]] = {
        "rollout": {
            "prompts_per_batch": prompts,
            "rollouts_per_prompt": rollouts,
            "rollout_deadline_seconds": deadline,
        }
    }
    recipe |= {
        "train": {"global_batch_size": 1},
        "reward": {"function": "rl_runtime.rollout.reward:label_reward"},
    }
    if hook is not None:
        assert hooks is not None
        setattr(hooks, "generate", hook)
        recipe["rollout"]["generate"] = f"{hooks.__name__}:generate"
    source, tokenizer = cast("DataSource", CountingSource()), cast("Tokenizer", DigitTokenizer())
    return BatchGenerator(
        Recipe.model_validate(recipe), source, tokenizer, [engine or FixedEngine()]
    )


def generate(subject: BatchGenerator) -> GeneratedBatch:
    return asyncio.run(subject.generate_batch())


def test_every_prompt_gets_its_rollouts_with_fresh_ids_and_rewards() -> None:
    subject = generator()
    first, second = generate(subject), generate(subject)
    ids = [
        rollout.rollout_id
        for batch in (first, second)
        for group in batch.groups
        for rollout in group.rollouts
    ]
    assert ids == list(range(12))
    assert [group.group_id for group in second.groups] == [2, 3]
    assert all(
        sample.reward == 1.0
        for group in first.groups
        for rollout in group.rollouts
        for sample in rollout.samples
    )


async def _raises(context: GenerateContext, prompt: Prompt, sampling: Sampling) -> Never:
    raise RuntimeError("a tool broke")


async def _empty(context: GenerateContext, prompt: Prompt, sampling: Sampling) -> list[Sample]:
    return []


async def _nothing(context: GenerateContext, prompt: Prompt, sampling: Sampling) -> None:
    return None


async def _mixed_ids(context: GenerateContext, prompt: Prompt, sampling: Sampling) -> list[Sample]:
    from dataclasses import replace

    sample = await single_turn(context, prompt, sampling)
    return [sample, replace(sample, rollout_id=sample.rollout_id + 1)]


@pytest.mark.parametrize(
    "bad", [_raises, _empty, _nothing, _mixed_ids], ids=lambda hook: hook.__name__
)
def test_a_rollout_that_always_fails_is_dropped_and_counted(
    hooks: types.ModuleType, bad: GenerateHook, caplog: pytest.LogCaptureFixture
) -> None:
    async def hook(
        context: GenerateContext, prompt: Prompt, sampling: Sampling
    ) -> Sample | list[Sample]:
        chosen: GenerateHook = bad if context.rollout_id == 4 else single_turn
        return await chosen(context, prompt, sampling)

    batch = generate(generator(hook, hooks))
    assert batch.dropped_rollouts == 1
    assert [len(group.rollouts) for group in batch.groups] == [3, 2]
    assert "rollout 4" in caplog.text


def test_a_rollout_that_fails_once_is_tried_again(hooks: types.ModuleType) -> None:
    calls = itertools.count()

    async def hook(context: GenerateContext, prompt: Prompt, sampling: Sampling) -> Sample:
        if next(calls) == 0:
            raise RuntimeError("once")
        return await single_turn(context, prompt, sampling)

    assert generate(generator(hook, hooks)).dropped_rollouts == 0


def test_a_batch_in_which_everything_fails_is_an_error(hooks: types.ModuleType) -> None:
    with pytest.raises(GenerateError, match="all 6 rollouts"):
        generate(generator(_raises, hooks))


def test_a_stuck_rollout_cannot_hold_the_batch(hooks: types.ModuleType) -> None:
    async def hook(context: GenerateContext, prompt: Prompt, sampling: Sampling) -> Sample:
        if context.rollout_id == 0:
            await asyncio.sleep(3600)
        return await single_turn(context, prompt, sampling)

    batch = generate(generator(hook, hooks, deadline=0.5))
    assert batch.dropped_rollouts == 1
    assert len(batch.groups) == 2


def test_a_dead_engine_ends_the_batch_at_once() -> None:
    with pytest.raises(EngineError, match="exited with code -9"):
        generate(generator(engine=DeadEngine()))


def test_an_evaluation_answers_each_prompt_once_without_the_custom_hook(
    hooks: types.ModuleType,
) -> None:
    batch = asyncio.run(generator(_raises, hooks).evaluate("eval", 5))
    assert [len(group.rollouts) for group in batch.groups] == [1] * 5
