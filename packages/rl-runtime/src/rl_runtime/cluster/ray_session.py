"""A Ray cluster for one run: started here, or joined.

Invariants: a cluster that was started here is stopped again, also after an error or an interrupt;
one that was joined is left as it was, less our actors.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker

from rl_runtime.cluster.placement import required_cpus
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import RuntimeSetupError
from rl_runtime.process.interrupts import delayed_interrupts, keeping_signal_handlers
from rl_runtime.process.logs import errors_to_file

__all__ = ["ray_session"]

_log = logging.getLogger(__name__)

_WORKER_NICENESS = "0"
"""Ray runs its workers, and so our engines and trainers, at niceness 15 unless told otherwise.

Anything else on the machine would starve them.
"""

_START_ATTEMPTS = 3
"""Ray gives its daemons 30 seconds to start, a limit that cannot be set.

On a machine that is busy with other work they need longer at times.
"""

_DAEMONS = ("gcs_server", "raylet")
"""Names of the processes without which a node of Ray does not work."""


@contextlib.contextmanager
def ray_session(recipe: Recipe) -> Iterator[list[psutil.Process]]:
    """Start or join Ray for the time of a `with` block.

    Gives Ray's own processes where it was started here. A cluster that is started here counts as
    many cores as the actors ask for, however few the machine has: the counts are shares for
    placement, not a promise of speed.

    Raises:
        RuntimeSetupError: the cluster at `cluster.address` does not answer, or Ray does not start.
    """
    _keep_off_the_terminal()
    try:
        _init(recipe)
        yield (
            []
            if recipe.cluster.address
            else [child for child in psutil.Process().children() if child.name() in _DAEMONS]
        )
    finally:
        with delayed_interrupts():
            ray.shutdown()


def _init(recipe: Recipe) -> None:
    address = recipe.cluster.address
    arguments = _arguments(recipe)
    attempts = 1 if address else _START_ATTEMPTS
    before = set(psutil.Process().children())
    for attempt in range(1, attempts + 1):
        try:
            # While it starts, Ray's native code answers signals with a stack trace, and connection
            # errors with a line a second.
            with keeping_signal_handlers(), errors_to_file(recipe.run.dir / "logs" / "driver.log"):
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
                return
        except SystemExit:
            # What Ray's own handler of SIGTERM raises while Ray starts.
            raise KeyboardInterrupt from None
        except Exception as error:
            # Ray raises whatever it likes here, a plain Exception among them.
            if attempt == attempts:
                hint = (
                    " (a cluster with token authentication wants RAY_AUTH_MODE=token in the"
                    " environment)"
                    if address
                    else ""
                )
                raise RuntimeSetupError(
                    f"cluster.address = {address!r}: Ray did not"
                    f" {'answer' if address else 'start'}: {error}{hint}"
                ) from error
            _log.warning("attempt %d of %d: Ray did not start: %s", attempt, attempts, error)
            ray.shutdown()
            # A node that did not come up is not stopped by that.
            for process in set(psutil.Process().children()) - before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _arguments(recipe: Recipe) -> dict[str, Any]:
    """Say to `ray.init` which cluster to join, or what kind to start."""
    environment = {"OMP_NUM_THREADS": str(recipe.cluster.threads_per_trainer)}
    if recipe.cluster.address:
        return {"address": recipe.cluster.address, "runtime_env": {"env_vars": environment}}
    # Ray's daemons hand the environment of this process down to every worker.
    os.environ.update(environment | {"RAY_worker_niceness": _WORKER_NICENESS})
    return {
        # Without an address Ray would join any cluster that it finds on this machine, another run's
        # for instance.
        "address": "local",
        "num_cpus": max(os.cpu_count() or 1, math.ceil(required_cpus(recipe))),
        "object_store_memory": recipe.cluster.object_store_bytes,
        "include_dashboard": False,
        "configure_logging": False,
    }


def _keep_off_the_terminal() -> None:
    """Send what Ray says to the run's log.

    It warns through a handler of its own, and prints the last words of a dead daemon.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)

    def log_lines(data: Mapping[str, Any], *_: object, **__: object) -> None:
        _log.warning("Ray: %s", "\n".join(data["lines"]))

    ray_worker.print_worker_logs = log_lines
