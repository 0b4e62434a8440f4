"""Notice that an actor or a server has died, at once and without asking.

Every actor has a method that does not return while all is well, in a concurrency group of its own
so that work does not delay it. Its reference becomes ready when something ended: with an error when
the actor's process died, with a reason when the actor itself knows one.

Invariants: a look costs no call to an actor, so one that is merely slow never counts as dead; the
message names what died.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayError

from rl_runtime.cluster.actor import Ref
from rl_runtime.errors import ActorError, EngineError

__all__ = ["Liveness", "why_it_died"]

_log = logging.getLogger(__name__)

_DETAIL = "Worker exit detail: "
_LONGEST_REASON = 300
_REASON_SECONDS = 5.0
"""For a reason that is there already and only has to be brought."""


class Liveness:
    """The watch over all actors of a run, and over the parts of Ray that keep them."""

    def __init__(
        self,
        live_calls: Mapping[str, Ref],
        *,
        daemons: Sequence[psutil.Process],
        logs: Path,
    ) -> None:
        """Remember what to watch.

        Args:
            live_calls: every actor's running call of `live`, by the actor's name in messages, such
                as "trainer rank 0".
            daemons: Ray's own processes on this machine, where the run started them.
            logs: folder that a message points to.
        """
        self._names = {ref: name for name, ref in live_calls.items()}
        self._daemons = {process: process.name() for process in daemons}
        self._logs = logs

    def check(self) -> None:
        """Raise when one of them has ended.

        Raises:
            EngineError: a server ended; the reason is the engine actor's.
            ActorError: the process of an actor died, or one of Ray's.
        """
        for process, name in self._daemons.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise ActorError(
                    f"Ray's {name} (pid {process.pid}) died, and the actors with it; logs are in"
                    f" {self._logs}"
                )
        if not self._names:
            return
        ended, _ = ray.wait(
            list(self._names), num_returns=len(self._names), timeout=0, fetch_local=False
        )
        reasons = [self._reason(ref) for ref in ended]
        for reason in reasons:
            _log.error("%s", reason)
        if reasons:
            raise reasons[0]

    def _reason(self, ref: Ref) -> Exception:
        try:
            return EngineError(str(ray.get(ref, timeout=_REASON_SECONDS)))
        except RayError as error:
            _log.error("%s: %s", self._names[ref], error)
            return ActorError(
                f"{self._names[ref]} died: {why_it_died(error)}; logs are in {self._logs}"
            )


def why_it_died(error: RayError) -> str:
    """Condense what Ray says of a dead actor to one line: its process id and how it ended."""
    lines = [line.strip() for line in str(error).splitlines()]
    pid = next((line.removeprefix("pid: ") for line in lines if line.startswith("pid: ")), None)
    text = " ".join(" ".join(lines).split())
    _, found, detail = text.partition(_DETAIL)
    reason = detail.split(". ")[0] if found else text[:_LONGEST_REASON]
    return f"(pid {pid}) {reason}" if pid else reason
