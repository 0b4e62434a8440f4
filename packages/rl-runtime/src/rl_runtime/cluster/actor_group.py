"""All actors of a run: created together, watched together, ended together.

Invariants: closing stops every server process, also when actors are stuck, and ends within a
deadline; whatever dies is noticed at the next poll.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from rl_runtime.cluster.engine_actor import EngineActor
from rl_runtime.cluster.liveness import LIFE_GROUP, Lives
from rl_runtime.cluster.placement import Placement, num_actors
from rl_runtime.cluster.rollout_actor import RolloutActor
from rl_runtime.cluster.trainer_actor import TrainerActor
from rl_runtime.cluster.waiting import Waiter
from rl_runtime.config.recipe import Recipe
from rl_runtime.contract_table import installed_contracts, refuse_mixed_cluster

__all__ = ["ActorGroup"]

_STOP_SECONDS = 15.0
_ENGINE_CALLS = 4
"""Calls that one engine actor answers side by side: it must say how its server is while that starts or loads weights."""


class ActorGroup:
    """The rollout actor, the engines and the trainers of one run."""

    def __init__(
        self,
        recipe: Recipe,
        placement: Placement,
        waiter: Waiter,
        *,
        daemons: Sequence[psutil.Process] = (),
    ) -> None:
        """Create all actors in their reserved places, watched by `waiter` together with Ray's own `daemons`."""
        logs = recipe.run.dir / "logs"
        num_engines, num_trainers = num_actors(recipe)
        self._recipe = recipe
        self._waiter = waiter
        self.rollout = _remote(RolloutActor, placement.manager_options()).remote(
            recipe, log_path=logs / "rollout.log"
        )
        self.engines = [
            _remote(
                EngineActor, placement.engine_options(index, recipe), calls=_ENGINE_CALLS
            ).remote(recipe, index=index, run_dir=recipe.run.dir)
            for index in range(num_engines)
        ]
        self.trainers = [
            _remote(TrainerActor, placement.trainer_options(rank, recipe)).remote(
                recipe, rank=rank, log_path=logs / f"trainer_{rank}.log"
            )
            for rank in range(num_trainers)
        ]
        self._data_parallel_ranks: list[int] = []
        self._exporter = 0
        self._urls: list[str] = [recipe.engine.url] if recipe.engine.url else []
        waiter.watch = Lives(self._lives(), daemons=daemons, logs=logs).check

    def start(self, model_folder: Path) -> list[ray.ObjectRef[Any]]:
        """Begin to start engines (slow), and start the rollout side and the trainers.

        Returns:
            What `finish_engines` waits for.

        Raises:
            RuntimeSetupError: some node has packages with other contracts than this one.
        """
        limit = self._recipe.cluster.actor_timeout_seconds
        self._refuse_mixed_cluster()
        engines = [engine.start.remote(model_folder) for engine in self.engines]
        sides = [self.rollout.start.remote(model_folder)]
        if self.trainers:
            rendezvous = self._waiter.one(
                self.trainers[0].rendezvous.remote(),
                "choosing the trainers' rendezvous",
                timeout_seconds=limit,
            )
            sides += [trainer.start.remote(rendezvous, model_folder) for trainer in self.trainers]
        _, *ranks = self._waiter.all(
            sides, "starting the rollout side and the trainers", timeout_seconds=limit
        )
        self._data_parallel_ranks = [data_parallel_rank for data_parallel_rank, _ in ranks]
        self._exporter = next((rank for rank, (_, exports) in enumerate(ranks) if exports), 0)
        return engines

    def finish_engines(self, starting: Sequence[ray.ObjectRef[Any]]) -> None:
        """Wait until the engines answer, and connect the rollout side to them."""
        limit = self._recipe.engine.start_timeout_seconds + 30
        self._urls += self._waiter.all(starting, "starting the engines", timeout_seconds=limit)
        self._waiter.one(
            self.rollout.connect.remote(self._urls, self.engines),
            "connecting to the engines",
            timeout_seconds=limit,
        )

    def call_trainers(self, method: str, *args: Any, what: str) -> list[Any]:
        """Call a method on every trainer rank with the same arguments and wait for all."""
        refs = [getattr(trainer, method).remote(*args) for trainer in self.trainers]
        return self._waiter.all(
            refs, what, timeout_seconds=self._recipe.cluster.actor_timeout_seconds
        )

    def train_sft(
        self, batches: Sequence[Sequence[Any]], lrs: Sequence[float]
    ) -> list[dict[str, float]]:
        """Take supervised steps; `batches` holds one reference per data-parallel rank for each step."""
        refs = [
            trainer.train_sft.remote([parts[rank] for parts in batches], list(lrs))
            for trainer, rank in zip(self.trainers, self._data_parallel_ranks, strict=True)
        ]
        reports: list[list[dict[str, float]]] = self._waiter.all(
            refs, "supervised steps", timeout_seconds=self._recipe.cluster.actor_timeout_seconds
        )
        return reports[self._exporter]

    def train_batch(
        self, parts: Sequence[Any], lr: float, *, batch_id: int
    ) -> list[dict[str, float]]:
        """Train on one batch; `parts` holds one reference per data-parallel rank.

        Returns:
            One report per optimizer step.
        """
        refs = [
            trainer.train_batch.remote(parts[rank], lr)
            for trainer, rank in zip(self.trainers, self._data_parallel_ranks, strict=True)
        ]
        reports: list[list[dict[str, float]]] = self._waiter.all(
            refs,
            f"training on batch {batch_id}",
            timeout_seconds=self._recipe.cluster.actor_timeout_seconds,
        )
        return reports[self._exporter]

    def sync_weights(self, version: int) -> None:
        """Send the trainers' weights to every engine; the engines' version is checked afterwards."""
        limit = self._recipe.cluster.actor_timeout_seconds
        exports = [trainer.export_weights.remote() for trainer in self.trainers]
        weights = exports.pop(self._exporter)
        updates = [engine.update_weights.remote(weights, version) for engine in self.engines]
        if len(self._urls) > len(self.engines):
            # Servers that others run have no actor; the rollout side is connected to them.
            updates.append(self.rollout.update_external_weights.remote(weights, version))
        self._waiter.all(
            [*exports, *updates], "sending weights to the engines", timeout_seconds=limit
        )

    def _named(self) -> dict[str, Any]:
        named = {"rollout actor": self.rollout}
        named |= {f"actor of engine {index}": engine for index, engine in enumerate(self.engines)}
        return named | {
            f"trainer rank {rank}": trainer for rank, trainer in enumerate(self.trainers)
        }

    def _lives(self) -> dict[str, ray.ObjectRef[Any]]:
        return {
            name: actor.live.options(concurrency_group=LIFE_GROUP).remote()
            for name, actor in self._named().items()
        }

    def _refuse_mixed_cluster(self) -> None:
        named = self._named()
        limit = self._recipe.cluster.actor_timeout_seconds
        asked = [actor.contracts.remote() for actor in named.values()]
        tables = self._waiter.all(
            asked, "asking every rank for its contracts", timeout_seconds=limit
        )
        refuse_mixed_cluster(
            {"this process": installed_contracts(), **dict(zip(named, tables, strict=True))}
        )

    def close(self) -> None:
        """End all actors. Servers are stopped first, then every actor is killed."""
        stopping = [engine.stop.remote() for engine in self.engines]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS)
        for actor in [*self.trainers, self.rollout, *self.engines]:
            with contextlib.suppress(RayError):
                ray.kill(actor)


def _remote(actor: type, options: Mapping[str, Any], *, calls: int = 1) -> Any:
    """Prepare an actor class that is never restarted and, beside `calls` calls at a time, answers the one that lasts as long as it lives."""
    at_a_time = {"max_concurrency": calls} if calls > 1 else {}
    return ray.remote(max_restarts=0, concurrency_groups={LIFE_GROUP: 1}, **at_a_time, **options)(
        actor
    )
