"""How one rollout of a prompt is played.

A generate hook gets a context that talks to the engine token in, token out, and builds samples from
what the engine said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rl_runtime.config.rollout import RolloutSection
from rl_runtime.engine.client import Generation, Sampling
from rl_runtime.errors import GenerateError
from rl_runtime.records.rollout_types import Prompt, Rollout, Sample
from rl_runtime.rollout.hooks import GenerateHook

__all__ = ["Engine", "GenerateContext", "play_rollout", "sampling_of", "single_turn"]


class Engine(Protocol):
    """What a generate hook needs of an engine."""

    async def generate(
        self, prompt_tokens: npt.NDArray[np.int64], sampling: Sampling
    ) -> Generation:
        """Sample one response."""


def sampling_of(section: RolloutSection) -> Sampling:
    """Take the sampling settings from `[rollout]`."""
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        max_new_tokens=section.max_response_tokens,
        stop=section.stop,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateContext:
    """One rollout in the making."""

    engine: Engine
    """Samples responses."""
    rollout_id: int
    """Id of this rollout; every sample carries it."""
    decode: Callable[[Sequence[int]], str]
    """Ids to text without special tokens."""

    def sample(self, prompt: Prompt, generation: Generation) -> Sample:
        """Build the sample of one prompt and one response, all of it trained."""
        R = generation.tokens.size
        nucleus = generation.nucleus
        return Sample(
            rollout_id=self.rollout_id,
            group_id=prompt.group_id,
            sample_index=prompt.sample_index,
            prompt_tokens=prompt.tokens,
            response_tokens=generation.tokens,
            loss_mask=np.ones(R, np.int32),
            rollout_log_probs=(
                generation.full_log_probs if nucleus is None else generation.kept_log_probs
            ),
            rollout_full_log_probs=generation.full_log_probs,
            weight_versions=np.full(R, generation.weight_version, np.int64),
            nucleus=nucleus,
            finish_reason=generation.finish_reason,
            prompt=prompt.text,
            response=self.decode(generation.tokens.tolist()),
            label=prompt.label,
            metadata=prompt.metadata,
        )


async def single_turn(context: GenerateContext, prompt: Prompt, sampling: Sampling) -> Sample:
    """Generate one response: the default hook."""
    return context.sample(prompt, await context.engine.generate(prompt.tokens, sampling))


async def play_rollout(
    hook: GenerateHook, context: GenerateContext, prompt: Prompt, sampling: Sampling
) -> Rollout:
    """Call a generate hook and check what it returns.

    Raises:
        GenerateError: the hook returned something that is no sample, an empty list, or samples with
            other ids; the message names the rollout.
    """
    result = await hook(context, prompt, sampling)
    samples: list[object] = list(result) if isinstance(result, list) else [result]
    checked = []
    for sample in samples:
        if not isinstance(sample, Sample):
            raise GenerateError(
                f"rollout {context.rollout_id} (group {prompt.group_id}): the generate function"
                f" returned {type(sample).__name__}; return a Sample or a list of Samples"
            )
        checked.append(sample)
    return Rollout(rollout_id=context.rollout_id, group_id=prompt.group_id, samples=tuple(checked))
