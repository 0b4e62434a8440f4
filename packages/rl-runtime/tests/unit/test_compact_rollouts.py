"""The shipped fan-out example: each token is trained exactly once."""

import asyncio

import numpy as np
import numpy.typing as npt
import pytest

from rl_runtime.config.rollout import RolloutSection
from rl_runtime.engine.generation import Generation, Sampling
from rl_runtime.examples.compact_rollouts import cut_into_segments, generate
from rl_runtime.records import Prompt, Sample
from rl_runtime.rollout.generate import play_rollout, sampling_of
from rl_runtime.rollout.hooks import GenerateContext
from rl_topp import NucleusSet


def sample(length: int) -> Sample:
    return Sample(
        rollout_id=4,
        group_id=1,
        sample_index=0,
        prompt_tokens=np.array([1, 2]),
        response_tokens=np.arange(10, 10 + length),
        loss_mask=np.ones(length, np.int32),
        rollout_log_probs=-np.arange(length, dtype=np.float32),
        weight_versions=np.zeros(length, np.int64),
        nucleus=NucleusSet.from_lists([[10 + token, 3] for token in range(length)], vocab_size=64),
    )


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_response_token_is_trained_exactly_once(length: int, count: int) -> None:
    siblings = cut_into_segments(sample(length), count)
    assert len(siblings) == count
    trained = [
        token
        for sibling in siblings
        for token in sibling.response_tokens[sibling.loss_mask == 1].tolist()
    ]
    assert trained == list(range(10, 10 + length))
    for sibling in siblings:
        np.testing.assert_array_equal(
            sibling.response_tokens, np.arange(10, 10 + sibling.response_tokens.size)
        )
        assert sibling.nucleus is not None
        assert [list(ids) for ids in sibling.nucleus] == [
            [10 + token, 3] for token in range(sibling.response_tokens.size)
        ]
    assert siblings[-1].response_tokens.size == length


def test_five_tokens_in_two_segments() -> None:
    first, second = cut_into_segments(sample(5), 2)
    assert first.loss_mask.tolist() == [1, 1]
    assert second.loss_mask.tolist() == [0, 0, 1, 1, 1]


class FixedEngine:
    async def generate(
        self, prompt_tokens: npt.NDArray[np.int64], sampling: Sampling
    ) -> Generation:
        del prompt_tokens, sampling
        return Generation(
            tokens=np.array([5, 6, 1]),
            full_log_probs=np.zeros(3, np.float32),
            nucleus_log_probs=np.zeros(3, np.float32),
            nucleus=NucleusSet.from_lists([[5], [6], [1]], vocab_size=64),
            finish_reason="stop",
            weight_version=2,
        )


@pytest.mark.parametrize("rollout_id", range(6))
def test_rollout_i_has_one_plus_i_mod_three_siblings(rollout_id: int) -> None:
    prompt = Prompt(group_id=0, sample_index=0, text="", tokens=np.array([9]), label="")
    context = GenerateContext(
        engine=FixedEngine(), rollout_id=rollout_id, decode=lambda ids: "".join(map(str, ids))
    )
    rollout = asyncio.run(play_rollout(generate, context, prompt, sampling_of(RolloutSection())))
    assert len(rollout.samples) == 1 + rollout_id % 3
    assert {sibling.rollout_id for sibling in rollout.samples} == {rollout_id}
    assert rollout.samples[-1].response == "561"
