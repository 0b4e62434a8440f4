"""The places where a recipe names a user's function by import path, and what such a function gets.

A hook is written `module:function`. It is loaded when the recipe is checked, so that a wrong path
fails before anything starts.

Invariants: what `load_hook` returns is callable; a context's samples carry its rollout id.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rl_runtime.engine.generation import Generation, Sampling
from rl_runtime.errors import ConfigError
from rl_runtime.records import Prompt, Sample

__all__ = ["Engine", "GenerateContext", "GenerateHook", "RewardHook", "load_hook"]


class Engine(Protocol):
    """What a generate hook needs of an engine."""

    async def generate(
        self, prompt_tokens: npt.NDArray[np.int64], sampling: Sampling
    ) -> Generation:
        """Sample one response."""


class GenerateContext:
    """A generate hook's handle on one rollout: its engine, its id, and a way to build samples."""

    def __init__(
        self, *, engine: Engine, rollout_id: int, decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Take what the hook may use.

        Args:
            engine: samples responses.
            rollout_id: id of this rollout; every sample carries it.
            decode: ids to text without special tokens.
        """
        self.engine = engine
        self.rollout_id = rollout_id
        self.decode = decode

    def sample(self, prompt: Prompt, generation: Generation) -> Sample:
        """Build the sample of one prompt and one response, all of it trained."""
        R = generation.tokens.size
        return Sample(
            rollout_id=self.rollout_id,
            group_id=prompt.group_id,
            sample_index=prompt.sample_index,
            prompt_tokens=prompt.tokens,
            response_tokens=generation.tokens,
            loss_mask=np.ones(R, np.int32),
            rollout_log_probs=generation.nucleus_log_probs,
            rollout_full_log_probs=generation.full_log_probs,
            weight_versions=np.full(R, generation.weight_version, np.int64),
            nucleus=generation.nucleus,
            finish_reason=generation.finish_reason,
            prompt=prompt.text,
            response=self.decode(generation.tokens.tolist()),
            label=prompt.label,
            metadata=prompt.metadata,
        )


class GenerateHook(Protocol):
    """A function that plays one rollout of a prompt."""

    def __call__(
        self, context: GenerateContext, prompt: Prompt, sampling: Sampling
    ) -> Awaitable[Sample | list[Sample]]:
        """Generate one rollout.

        Args:
            context: the engine, the id of this rollout, and a way to build samples.
            prompt: what to answer.
            sampling: the recipe's sampling settings.

        Returns:
            One sample, or a list of them (a fan-out): siblings that share the context's
            `rollout_id`.
        """


class RewardHook(Protocol):
    """A function that scores a response."""

    def __call__(self, sample: Sample) -> float | Mapping[str, float]:
        """Score the last sample of a rollout; its siblings get the same reward.

        Returns:
            The reward, or a mapping with the key "reward" and further scores that are logged, such
            as "exact_match".
        """


def load_hook(path: str) -> object:
    """Import the function that `path` names.

    Args:
        path: "module:function".

    Raises:
        ConfigError: not of that form, no such module or function, a module that cannot be imported,
            or not callable.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(
            f"hook {path!r}: expected module:function, such as"
            " rl_runtime.rollout.reward:verifier_reward"
        )
    try:
        hook = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"hook {path!r}: {error}") from error
    except Exception as error:
        # Whatever a user's module does when it is imported.
        raise ConfigError(
            f"hook {path!r}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
    if not callable(hook):
        raise ConfigError(f"hook {path!r}: is a {type(hook).__name__}, not a function")
    return hook
