"""An SGLang server as a Ray actor.

The actor is light: the server is a process of its own, which dies with it.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rl_runtime.cluster.actor import Actor
from rl_runtime.engine.process import EngineProcess
from rl_runtime.weights.sync.inline import update_weights

__all__ = ["EngineActor"]


class EngineActor(Actor):
    """The keeper of one server, which it starts, watches and stops."""

    _process: EngineProcess | None = None

    def start(self, model_folder: Path) -> str:
        """Start the server on a model folder and wait until it answers.

        Returns:
            Its URL.
        """
        self._process = EngineProcess(self._recipe, index=self._index, model_folder=model_folder)
        self._process.start()
        return self._process.url

    def live(self) -> str:
        """Last as long as the server, or as the actor where no server was started.

        See `cluster.liveness`.

        Returns:
            Why the server is no longer alive.
        """
        while (reason := self.failure()) is None:
            time.sleep(self._recipe.engine.health_interval_seconds)
        return reason

    def failure(self) -> str | None:
        """Say why the server is no longer alive, or None while it lives or has not been started."""
        return None if self._process is None else self._process.failure()

    def update_weights(self, weights: dict[str, npt.NDArray[np.generic]], version: int) -> None:
        """Load weights into the server and check that it took them; see `weights.sync`."""
        assert self._process is not None, "start first"
        update_weights(
            self._process.url,
            weights,
            version=version,
            timeout_seconds=self._recipe.engine.request_timeout_seconds,
        )

    def stop(self) -> None:
        """Stop the server and all of its processes."""
        if self._process is not None:
            self._process.stop()
