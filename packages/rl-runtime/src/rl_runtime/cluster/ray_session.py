"""A Ray cluster for one run: started here, or joined. Layer: cluster.

Invariants: a cluster that was started here is stopped again, also after an error; one that was joined is left as it was, less our actors.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator

import ray

from rl_runtime.cluster.placement import required_cpus
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import RuntimeSetupError

__all__ = ["ray_session"]

_WORKER_NICENESS = "0"
"""Ray runs its workers, and so our engines and trainers, at niceness 15 unless told otherwise: anything else on the machine would starve them."""


@contextlib.contextmanager
def ray_session(recipe: Recipe) -> Iterator[None]:
    """Start or join Ray for the time of a `with` block.

    A cluster that is started here counts as many cores as the actors ask for, however few the machine has: the counts are
    shares for placement, not a promise of speed.

    Raises:
        RuntimeSetupError: the cluster at `cluster.address` does not answer.
    """
    environment = {"OMP_NUM_THREADS": str(recipe.cluster.threads_per_trainer)}
    address = recipe.cluster.address
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": environment})
        else:
            os.environ.update(environment | {"RAY_worker_niceness": _WORKER_NICENESS})
            ray.init(
                num_cpus=max(os.cpu_count() or 1, math.ceil(required_cpus(recipe))),
                object_store_memory=recipe.cluster.object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        msg = f"cluster.address = {address!r}: Ray did not {'answer' if address else 'start'}: {error}"
        raise RuntimeSetupError(msg) from error
    try:
        yield
    finally:
        ray.shutdown()
