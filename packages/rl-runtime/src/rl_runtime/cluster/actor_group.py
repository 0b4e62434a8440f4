"""All actors of a run: created together, watched together, ended together.

Invariants: closing stops every server process, also when actors are stuck, and ends within a
deadline; whatever dies is noticed at the next poll.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from rl_runtime.cluster.actor import LIFE_GROUP, Ref, remote_class
from rl_runtime.cluster.engine_actor import EngineActor
from rl_runtime.cluster.liveness import Liveness
from rl_runtime.cluster.placement import Placement
from rl_runtime.cluster.rollout_actor import RolloutActor
from rl_runtime.cluster.trainer_actor import TrainerActor
from rl_runtime.cluster.waiting import Waiter
from rl_runtime.config.recipe import Recipe
from rl_runtime.contract_table import installed_contracts, refuse_mixed_cluster
from rl_runtime.process.interrupts import delayed_interrupts

__all__ = ["ActorGroup"]

_STOP_SECONDS = 15.0
"""For all servers to be killed; an engine actor itself gives up after 10."""
_MARGIN_SECONDS = 30.0
"""How much longer to wait than an engine's actor, which tells why it did not start."""
_ENGINE_CALLS = 4
"""Calls that one engine actor answers side by side.

It must say how its server is while that starts or loads weights.
"""


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
        """Create all actors in their places, watched by `waiter` with Ray's own `daemons`."""
        self._recipe = recipe
        self._waiter = waiter
        self._placement = placement
        self.rollout = remote_class(RolloutActor, placement.rollout)(recipe, log="rollout.log")
        self.engines = [
            remote_class(EngineActor, options, calls=_ENGINE_CALLS)(
                recipe, log=f"engine_actor_{index}.log", index=index
            )
            for index, options in enumerate(placement.engines)
        ]
        self.trainers = [
            remote_class(TrainerActor, options)(recipe, log=f"trainer_{rank}.log", index=rank)
            for rank, options in enumerate(placement.trainers)
        ]
        self._named = {
            "rollout actor": self.rollout,
            **{f"actor of engine {index}": engine for index, engine in enumerate(self.engines)},
            **{f"trainer rank {rank}": trainer for rank, trainer in enumerate(self.trainers)},
        }
        self._data_parallel_ranks: list[int] = []
        self._writer = 0
        self._urls: list[str] = [recipe.engine.url] if recipe.engine.url else []
        live_calls = {
            name: actor.live.options(concurrency_group=LIFE_GROUP).remote()
            for name, actor in self._named.items()
        }
        waiter.watch = Liveness(live_calls, daemons=daemons, logs=recipe.run.dir / "logs").check

    def start(self, model_folder: Path) -> list[Ref]:
        """Begin to start engines (slow), and start the rollout side and the trainers.

        Returns:
            What `finish_engines` waits for.

        Raises:
            RuntimeSetupError: some node has packages with other contracts than this one.
        """
        self._refuse_mixed_cluster()
        engines = [engine.start.remote(model_folder) for engine in self.engines]
        sides = [self.rollout.start.remote(model_folder)]
        if self.trainers:
            (rendezvous,) = self._wait(
                [self.trainers[0].rendezvous.remote()], "choosing the trainers' rendezvous"
            )
            sides += [trainer.start.remote(rendezvous, model_folder) for trainer in self.trainers]
        _, *ranks = self._wait(sides, "starting the rollout side and the trainers")
        self._data_parallel_ranks = [data_parallel_rank for data_parallel_rank, _ in ranks]
        self._writer = next((rank for rank, (_, is_writer) in enumerate(ranks) if is_writer), 0)
        return engines

    def finish_engines(self, starting: Sequence[Ref]) -> None:
        """Wait until the engines answer, and connect the rollout side to them."""
        limit = self._recipe.engine.start_timeout_seconds + _MARGIN_SECONDS
        self._urls += self._waiter.all(starting, "starting the engines", timeout_seconds=limit)
        self._waiter.one(
            self.rollout.connect.remote(self._urls, self.engines),
            "connecting to the engines",
            timeout_seconds=limit,
        )

    def call_trainers(self, method: str, *args: Any, what: str) -> list[Any]:
        """Call a method of every rank's `Trainer` with the same arguments and wait for all."""
        return self._wait([trainer.call.remote(method, *args) for trainer in self.trainers], what)

    def train(
        self, method: str, shares: Sequence[Any], lr: object, *, what: str
    ) -> list[dict[str, float]]:
        """Call a method of every trainer's actor with its share of a batch and wait for all.

        Args:
            method: such as "train_batch".
            shares: by data-parallel rank, what ranks with that rank are given: references.
            lr: learning rate, or one per step.
            what: for the error message.

        Returns:
            One report per optimizer step.
        """
        refs = [
            getattr(trainer, method).remote(shares[rank], lr)
            for trainer, rank in zip(self.trainers, self._data_parallel_ranks, strict=True)
        ]
        # Equal on every rank, but for what a clock measures.
        reports: list[dict[str, float]] = self._wait(refs, what)[self._writer]
        return reports

    def sync_weights(self, version: int) -> None:
        """Send the trainers' weights to every engine and have their version checked."""
        exports = [trainer.call.remote("export_weights") for trainer in self.trainers]
        weights = exports.pop(self._writer)
        updates = [engine.update_weights.remote(weights, version) for engine in self.engines]
        if len(self._urls) > len(self.engines):
            # Servers that others run have no actor; the rollout side is connected to them.
            updates.append(self.rollout.update_external_weights.remote(weights, version))
        self._wait([*exports, *updates], "sending weights to the engines")

    def close(self) -> None:
        """End all actors and give their places back.

        Servers are stopped first, then every actor is killed.
        """
        # An impatient second Ctrl-C must not leave servers behind.
        with delayed_interrupts():
            stopping = [engine.stop.remote() for engine in self.engines]
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS)
            for actor in [*self.trainers, self.rollout, *self.engines]:
                with contextlib.suppress(RayError):
                    ray.kill(actor)
            self._placement.release()

    def _wait(self, refs: Sequence[Ref], what: str) -> list[Any]:
        """Wait for calls that each have `cluster.actor_timeout_seconds`."""
        return self._waiter.all(
            refs, what, timeout_seconds=self._recipe.cluster.actor_timeout_seconds
        )

    def _refuse_mixed_cluster(self) -> None:
        asked = [actor.contracts.remote() for actor in self._named.values()]
        tables = self._wait(asked, "asking every rank for its contracts")
        refuse_mixed_cluster(
            {"this process": installed_contracts(), **dict(zip(self._named, tables, strict=True))}
        )
