"""A generate hook with a fan-out of 1 + (i mod 3) samples.

It stands for an agent that compacts its context while it works.

The response of rollout i is cut into 1 + (i mod 3) segments. Sibling k ends with segment k and
trains on that segment only, so that each generated token is trained exactly once. With the rollout
mean the gradient is the one without fan-out: each token has the same prefix and the same weight,
`1 / (trained tokens of the rollout)`.

Name it in a recipe as `rollout.generate = "rl_runtime.examples.compact_rollouts:generate"`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rl_runtime.engine.generation import Sampling
from rl_runtime.records import Prompt, Sample
from rl_runtime.rollout.generate import single_turn
from rl_runtime.rollout.hooks import GenerateContext

__all__ = ["cut_into_segments", "generate"]

_LARGEST_FAN_OUT = 3


async def generate(context: GenerateContext, prompt: Prompt, sampling: Sampling) -> list[Sample]:
    """Generate one response and return it as 1 + (rollout_id mod 3) siblings."""
    sample = await single_turn(context, prompt, sampling)
    return [
        replace(sibling, response=context.decode(sibling.response_tokens.tolist()))
        for sibling in cut_into_segments(sample, 1 + context.rollout_id % _LARGEST_FAN_OUT)
    ]


def cut_into_segments(sample: Sample, count: int) -> list[Sample]:
    """Cut a sample into siblings that each train one segment of its response.

    Args:
        sample: the whole response, R tokens.
        count: siblings. More than R: the first ones have an all-zero loss mask.

    Returns:
        `count` samples; sibling k holds the response up to the end of segment k. The last one is
        the whole response.

    Example:
        R = 5, count = 2: segments [0, 2) and [2, 5); siblings of 2 and 5 response tokens with masks
        11 and 00111.
    """
    R = sample.response_tokens.size
    ends = [R * (k + 1) // count for k in range(count)]
    siblings = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        length = max(end, 1)
        position = np.arange(length)
        mask = sample.loss_mask[:length] * ((position >= start) & (position < end))
        siblings.append(_shorten(sample, length, mask.astype(np.int32)))
    return siblings


def _shorten(
    sample: Sample, length: int, loss_mask: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> Sample:
    full = sample.rollout_full_log_probs
    return replace(
        sample,
        response_tokens=sample.response_tokens[:length],
        loss_mask=loss_mask,
        rollout_log_probs=sample.rollout_log_probs[:length],
        rollout_full_log_probs=None if full is None else full[:length],
        weight_versions=sample.weight_versions[:length],
        nucleus=None if sample.nucleus is None else sample.nucleus.slice(0, length),
    )
