"""How one rollout of a prompt is played: the default generate hook, and the check of any hook.

Invariants: what `play_rollout` returns is a checked `Rollout` with the context's id.
"""

from __future__ import annotations

from rl_runtime.config.rollout import RolloutSection
from rl_runtime.engine.generation import Sampling
from rl_runtime.errors import GenerateError
from rl_runtime.records import Prompt, Rollout, Sample
from rl_runtime.rollout.hooks import GenerateContext, GenerateHook

__all__ = ["play_rollout", "sampling_of", "single_turn"]


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


async def single_turn(context: GenerateContext, prompt: Prompt, sampling: Sampling) -> Sample:
    """Generate one response: the default hook."""
    return context.sample(prompt, await context.engine.generate(prompt.tokens, sampling))


async def play_rollout(
    hook: GenerateHook, context: GenerateContext, prompt: Prompt, sampling: Sampling
) -> Rollout:
    """Call a generate hook and check what it returns.

    Raises:
        GenerateError: the hook returned something else than samples, an empty list, or samples
            with other ids; the message names the rollout.
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
