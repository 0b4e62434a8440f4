"""Wait for Ray tasks with a deadline, while watching that nothing they depend on has died.

Invariants: a wait ends at the deadline; the first failed task ends it at once, while its peers may
hang in a collective; watchers run at least every interval.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rl_runtime.cluster.actor import Ref
from rl_runtime.cluster.liveness import why_it_died
from rl_runtime.errors import ActorError, DeadlineError

__all__ = ["Waiter"]

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
"""Between two looks at what may have died."""
_LOOKS = 4
"""How often to look for the actor that died: word of its end comes within a second."""


class Waiter:
    """The wait for tasks; `watch`, called at every poll, raises when the run cannot go on."""

    def __init__(self, *, run_deadline: float) -> None:
        """Bind all waits to the run's own deadline.

        Args:
            run_deadline: `time.monotonic()` value at which the run must end.
        """
        self._run_deadline = run_deadline
        self.watch: Callable[[], None] = lambda: None

    def all(self, refs: Sequence[Ref], what: str, *, timeout_seconds: float) -> list[Any]:
        """Wait for all tasks and return their results, in order.

        Args:
            refs: results of remote calls.
            what: what is waited for, for the error message.
            timeout_seconds: deadline of this wait.

        Raises:
            DeadlineError: not done in time.
            ActorError: an actor died; an EngineError instead where its server did.
            Exception: whatever a task raised.
        """
        deadline = min(time.monotonic() + timeout_seconds, self._run_deadline)
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
            for ref in done:
                self._result(ref, what)
            self.watch()
            if pending and time.monotonic() > deadline:
                limit = (
                    "run.deadline_seconds"
                    if deadline == self._run_deadline
                    else f"{timeout_seconds:.0f} s"
                )
                raise DeadlineError(
                    f"{what}: not done within {limit}; {len(pending)} of {len(refs)} tasks are"
                    " still running"
                )
        return [self._result(ref, what) for ref in refs]

    def one(self, ref: Ref, what: str, *, timeout_seconds: float) -> Any:
        """Wait for one task; see `all`."""
        return self.all([ref], what, timeout_seconds=timeout_seconds)[0]

    def _result(self, ref: Ref, what: str) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            _log.error("%s", error)
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except RayError as error:
            _log.error("%s: %s", what, error)
            self._let_watch_name_the_dead()
            raise ActorError(f"{what}: {type(error).__name__}: {why_it_died(error)}") from None

    def _let_watch_name_the_dead(self) -> None:
        """Give `watch` the time to raise with the name of the actor that died.

        It hears of a death at about the same time as the failed task, but not always first.
        """
        for _ in range(_LOOKS):
            self.watch()
            time.sleep(_POLL_SECONDS)
