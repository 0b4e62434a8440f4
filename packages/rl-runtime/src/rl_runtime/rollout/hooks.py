"""The places where a recipe names a user's function by import path, each as a Protocol.

A hook is written `module:function`. It is loaded when the recipe is checked, so that a wrong path
fails before anything starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Protocol

from rl_runtime.errors import ConfigError

if TYPE_CHECKING:
    from rl_runtime.engine.client import Sampling
    from rl_runtime.records.rollout_types import Prompt, Sample
    from rl_runtime.rollout.generate import GenerateContext

__all__ = ["GenerateHook", "RewardHook", "load_hook"]


class GenerateHook(Protocol):
    """Plays one rollout of a prompt."""

    def __call__(
        self, context: GenerateContext, prompt: Prompt, sampling: Sampling
    ) -> Awaitable[Sample | list[Sample]]:
        """Generate one rollout.

        Args:
            context: the engine, the ids of this rollout, and helpers that build samples.
            prompt: what to answer.
            sampling: the recipe's sampling settings.

        Returns:
            One sample, or a list of them (a fan-out): siblings that share the context's
            `rollout_id`.
        """


class RewardHook(Protocol):
    """Scores a response."""

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
