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
]


class ActorError(RuntimeError):
    """A dead process of an actor, or of the part of Ray that keeps it.

    The message names the actor, and its process and log where they are known.
    """


class ConfigError(ValueError):
    """A wrong recipe or override.

    The message names the key and, where one is near, the key that was meant.
    """


class RuntimeSetupError(RuntimeError):
    """A machine that cannot run what the recipe asks for.

    A taken port, a missing folder, no placement in time.
    """


class EngineError(RuntimeError):
    """An inference engine that died, refused a request, or holds other weights than were sent."""


class GenerateError(ValueError):
    """A generate function's result that does not make a rollout.

    Nothing, mixed ids, or arrays of unequal length.
    """


class ReplayError(ValueError):
    """A file that is not an exported micro-batch, or that does not fit the model.

    The message names the file and the field.
    """


class RewardError(ValueError):
    """A reward that is missing, not a finite number, or late."""


class TrainerError(RuntimeError):
    """A failed trainer rank; the message names the rank and the first cause."""


class BatchMismatchError(ValueError):
    """A plan and columns that do not belong together, or ranks that hold different ones."""


class DeadlineError(TimeoutError):
    """Something that was waited for and did not happen in time.

    The message names it and the deadline in seconds.
    """
