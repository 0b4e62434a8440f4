"""An actor of a run: what all of their classes share, and what Ray makes of one.

Ray makes the methods of a handle at run time, so a type checker knows neither their names nor their
arguments; it does tell handles from actors, and references from results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

import ray

from rl_runtime.config.recipe import Recipe
from rl_runtime.contract_table import ContractTable, installed_contracts
from rl_runtime.process.logs import log_to_file

__all__ = ["LIFE_GROUP", "Actor", "ActorHandle", "Ref", "remote_class"]

LIFE_GROUP = "life"
"""Concurrency group of the methods that last as long as their actor."""


class Actor:
    """A process of a run. It is made at once; what is slow to load is left to a method `start`."""

    def __init__(self, recipe: Recipe, *, log: str, index: int = 0) -> None:
        """Send everything that the process prints to a file of the run.

        Args:
            recipe: the run's.
            log: name of the file.
            index: which engine or trainer rank it is.
        """
        log_to_file(recipe.run.dir / "logs" / log)
        self._recipe = recipe
        self._index = index

    def contracts(self) -> ContractTable:
        """Say which contracts the packages on this node write and read."""
        return installed_contracts()


class Ref(Protocol):
    """A reference to the result of a remote call, or to an object that was put into the store."""

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the result, in a coroutine."""


class RemoteMethod(Protocol):
    """One method of an actor."""

    def remote(self, *args: Any, **kwargs: Any) -> Ref:
        """Call it; references among the arguments arrive as what they refer to."""

    def options(self, *, concurrency_group: str) -> RemoteMethod:
        """Have it run beside the calls of other groups."""


class ActorHandle(Protocol):
    """An actor in a process of its own."""

    def __getattr__(self, name: str) -> RemoteMethod:
        """Give one of its methods."""


def remote_class(
    actor: type[Actor], options: Mapping[str, Any], *, calls: int = 1
) -> Callable[..., ActorHandle]:
    """Prepare an actor's class, and return what makes an actor of the constructor's arguments.

    Args:
        actor: the class. Its actors are never restarted.
        options: place and resources, as Ray names them.
        calls: calls that it answers at a time, beside the one that lasts as long as it lives.
    """
    # Left out, Ray's own default holds: 1, but 1000 for a class of coroutines.
    at_a_time = {"max_concurrency": calls} if calls > 1 else {}
    prepare = ray.remote(max_restarts=0, concurrency_groups={LIFE_GROUP: 1}, **at_a_time, **options)
    made: Callable[..., ActorHandle] = prepare(actor).remote
    return made
