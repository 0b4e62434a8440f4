"""All actors of a run: created together, watched together, ended together. Layer: cluster.

Invariants: closing stops every server process, also when actors are stuck; the first dead engine is noticed within the watch interval.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rl_runtime.cluster.engine_actor import EngineActor
from rl_runtime.cluster.placement import Placement, num_actors
from rl_runtime.cluster.rollout_actor import RolloutActor
from rl_runtime.cluster.trainer_actor import TrainerActor
from rl_runtime.cluster.waiting import Waiter
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import EngineError

__all__ = ["ActorGroup"]

_STOP_SECONDS = 15.0
_ENGINE_CALLS = 4
"""Calls that one engine actor answers side by side: it must say how its server is while that starts or loads weights."""


class ActorGroup:
    """The rollout actor, the engines and the trainers of one run."""

    def __init__(self, recipe: Recipe, placement: Placement, waiter: Waiter) -> None:
        """Create all actors in their reserved places."""
        logs = recipe.run.dir / "logs"
        num_engines, num_trainers = num_actors(recipe)
        self._recipe = recipe
        self._waiter = waiter
        self._last_watch = time.monotonic()
        self.rollout = ray.remote(RolloutActor).options(max_restarts=0, **placement.manager_options()).remote(recipe, log_path=logs / "rollout.log")
        self.engines = [
            ray.remote(EngineActor).options(max_restarts=0, max_concurrency=_ENGINE_CALLS, **placement.engine_options(index, recipe)).remote(recipe, index=index, run_dir=recipe.run.dir)
            for index in range(num_engines)
        ]
        self.trainers = [
            ray.remote(TrainerActor).options(max_restarts=0, **placement.trainer_options(rank, recipe)).remote(recipe, rank=rank, log_path=logs / f"trainer_{rank}.log")
            for rank in range(num_trainers)
        ]
        self._data_parallel_ranks: list[int] = []
        self._exporter = 0
        self._urls: list[str] = [recipe.engine.url] if recipe.engine.url else []
        waiter.watch = self.watch

    def start(self, model_folder: Path) -> list[ray.ObjectRef[Any]]:
        """Begin to start engines (slow), and start the rollout side and the trainers.

        Returns:
            What `finish_engines` waits for.
        """
        limit = self._recipe.cluster.actor_timeout_seconds
        engines = [engine.start.remote(model_folder) for engine in self.engines]
        sides = [self.rollout.start.remote(model_folder)]
        if self.trainers:
            rendezvous = self._waiter.one(self.trainers[0].rendezvous.remote(), "choosing the trainers' rendezvous", timeout_seconds=limit)
            sides += [trainer.start.remote(rendezvous, model_folder) for trainer in self.trainers]
        _, *ranks = self._waiter.all(sides, "starting the rollout side and the trainers", timeout_seconds=limit)
        self._data_parallel_ranks = [data_parallel_rank for data_parallel_rank, _ in ranks]
        self._exporter = next((rank for rank, (_, exports) in enumerate(ranks) if exports), 0)
        return engines

    def finish_engines(self, starting: Sequence[ray.ObjectRef[Any]]) -> None:
        """Wait until the engines answer, and connect the rollout side to them."""
        limit = self._recipe.engine.start_timeout_seconds + 30
        self._urls += self._waiter.all(starting, "starting the engines", timeout_seconds=limit)
        self._waiter.one(self.rollout.connect.remote(self._urls, self.engines), "connecting to the engines", timeout_seconds=limit)

    def call_trainers(self, method: str, *args: Any, what: str) -> list[Any]:
        """Call a method on every trainer rank with the same arguments and wait for all."""
        refs = [getattr(trainer, method).remote(*args) for trainer in self.trainers]
        return self._waiter.all(refs, what, timeout_seconds=self._recipe.cluster.actor_timeout_seconds)

    def train_sft(self, batches: Sequence[Sequence[Any]], lrs: Sequence[float]) -> list[dict[str, float]]:
        """Take supervised steps; `batches` holds one reference per data-parallel rank for each step."""
        refs = [
            trainer.train_sft.remote([parts[rank] for parts in batches], list(lrs))
            for trainer, rank in zip(self.trainers, self._data_parallel_ranks, strict=True)
        ]
        reports: list[list[dict[str, float]]] = self._waiter.all(
            refs, "supervised steps", timeout_seconds=self._recipe.cluster.actor_timeout_seconds
        )
        return reports[self._exporter]

    def train_batch(self, parts: Sequence[Any], lr: float, *, batch_id: int) -> list[dict[str, float]]:
        """Train on one batch; `parts` holds one reference per data-parallel rank.

        Returns:
            One report per optimizer step.
        """
        refs = [
            trainer.train_batch.remote(parts[rank], lr) for trainer, rank in zip(self.trainers, self._data_parallel_ranks, strict=True)
        ]
        reports: list[list[dict[str, float]]] = self._waiter.all(
            refs, f"training on batch {batch_id}", timeout_seconds=self._recipe.cluster.actor_timeout_seconds
        )
        return reports[self._exporter]

    def sync_weights(self, version: int) -> None:
        """Send the trainers' weights to every engine; the engines' version is checked afterwards."""
        limit = self._recipe.cluster.actor_timeout_seconds
        exports = [trainer.export_weights.remote() for trainer in self.trainers]
        weights = exports.pop(self._exporter)
        updates = [engine.update_weights.remote(weights, version) for engine in self.engines]
        self._waiter.all([*exports, *updates], "sending weights to the engines", timeout_seconds=limit)

    def watch(self) -> None:
        """Raise when an engine has died; asks at most once per `engine.health_interval_seconds`.

        Raises:
            EngineError: names the engine and quotes its last words.
        """
        if time.monotonic() - self._last_watch < self._recipe.engine.health_interval_seconds:
            return
        self._last_watch = time.monotonic()
        for index, engine in enumerate(self.engines):
            try:
                failure = ray.get(engine.failure.remote(), timeout=10)
            except RayError as error:
                failure = f"its actor died: {' '.join(str(error).split())[:200]}"
            if failure is not None:
                msg = f"engine {index}: {failure}"
                raise EngineError(msg)

    def close(self) -> None:
        """End all actors. Servers are stopped first, then every actor is killed."""
        stopping = [engine.stop.remote() for engine in self.engines]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS)
        for actor in [*self.trainers, self.rollout, *self.engines]:
            with contextlib.suppress(RayError):
                ray.kill(actor)
