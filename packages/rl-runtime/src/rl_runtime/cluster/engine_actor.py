"""An SGLang server as a Ray actor.

The actor is light: the server is a process of its own, which dies with it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rl_runtime.process.logs import log_to_file
from rl_runtime.config.recipe import Recipe
from rl_runtime.contract_table import ContractTable, installed_contracts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rl_runtime.engine.process import EngineProcess

__all__ = ["EngineActor"]


class EngineActor:
    """Starts, watches and stops one server."""

    def __init__(self, recipe: Recipe, *, index: int, run_dir: Path) -> None:
        """Remember what to start; starting is `start`'s task."""
        log_to_file(run_dir / "logs" / f"engine_actor_{index}.log")
        self._recipe = recipe
        self._index = index
        self._run_dir = run_dir
        self._process: EngineProcess | None = None

    def contracts(self) -> ContractTable:
        """Say which contracts the packages on this node write and read."""
        return installed_contracts()

    def start(self, model_folder: Path) -> str:
        """Start the server on a model folder and wait until it answers.

        Returns:
            Its URL.
        """
        from rl_runtime.engine.process import EngineProcess

        self._process = EngineProcess(
            self._recipe, index=self._index, model_folder=model_folder, run_dir=self._run_dir
        )
        self._process.start()
        return self._process.url

    def live(self) -> str:
        """Last as long as the server, or as the actor where no server was started; see
        `cluster.lives`.

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
        """Load weights into the server and check that it took them; see `weights.sync_tensor`."""
        from rl_runtime.weights.sync.inline import update_weights

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
