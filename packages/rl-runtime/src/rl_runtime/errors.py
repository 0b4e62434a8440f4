"""Errors of the training system.

Each error subclasses the builtin a caller would catch and says what was given, where, and what to
do.
"""

from __future__ import annotations

__all__ = [
    "ActorError",
    "BatchMismatchError",
    "ConfigError",
    "DeadlineError",
    "EngineError",
    "GenerateError",
    "ReplayError",
    "RewardError",
    "RuntimeSetupError",
    "TrainerError",
    "UnsupportedContractError",
]


class ActorError(RuntimeError):
    """An actor's process died, or the part of Ray that keeps it; the message names the actor, and its process and log where they are known."""


class ConfigError(ValueError):
    """A recipe or an override is wrong; the message names the key and, where one is near, the key that was meant."""


class RuntimeSetupError(RuntimeError):
    """The machine cannot run what the recipe asks for (a taken port, a missing folder, no placement in time)."""


class EngineError(RuntimeError):
    """An inference engine died, refused a request, or holds another weight version than the trainers sent."""


class GenerateError(ValueError):
    """A generate function returned something that is no rollout: nothing, mixed ids, or arrays of unequal length."""


class ReplayError(ValueError):
    """A file is no exported micro-batch, or does not fit the model it is to be replayed with; the message names the file and the field."""


class RewardError(ValueError):
    """A reward is missing, not a finite number, or was not given in time."""


class TrainerError(RuntimeError):
    """A trainer rank failed; the message names the rank and the first cause."""


class BatchMismatchError(ValueError):
    """Trainer ranks hold different plans or columns for one batch; the message names both digests."""


class DeadlineError(TimeoutError):
    """Something that was waited for did not happen in time; the message names it and the deadline in seconds."""


class UnsupportedContractError(ValueError):
    """A document has another contract id than the reader supports; the message names both and the fix."""
