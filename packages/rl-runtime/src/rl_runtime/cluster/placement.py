"""Reserve room for all actors of a run before any is started.

Invariants: a run has all of its room or none; waiting for it ends at
`cluster.placement_timeout_seconds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import RuntimeSetupError

__all__ = ["Placement", "num_actors", "required_cpus", "reserve"]

_MANAGER_CPUS = 0.25


def required_cpus(recipe: Recipe) -> float:
    """CPU cores that Ray counts for all actors of a run."""
    engines, trainers = num_actors(recipe)
    return (
        _MANAGER_CPUS
        + engines * recipe.cluster.cpus_per_engine
        + trainers * recipe.cluster.cpus_per_trainer
    )


def num_actors(recipe: Recipe) -> tuple[int, int]:
    """How many engine actors and how many trainer actors a run has."""
    engines = 0 if recipe.engine.url or recipe.debug.load_rollout_dump else recipe.engine.count
    trainers = 0 if recipe.debug.rollout_only else recipe.parallel.world_size
    return engines, trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A reserved placement group: bundle 0 is the rollout manager's, then engines, then trainers."""

    group: PlacementGroup
    """Ray's placement group."""
    num_engines: int
    """Engine bundles."""

    def manager_options(self) -> dict[str, Any]:
        """Options of the rollout manager's actor."""
        return {"num_cpus": _MANAGER_CPUS, **self._at(0)}

    def engine_options(self, index: int, recipe: Recipe) -> dict[str, Any]:
        """Options of engine `index`'s actor."""
        return {
            "num_cpus": recipe.cluster.cpus_per_engine,
            "num_gpus": _engine_gpus(recipe),
            **self._at(1 + index),
        }

    def trainer_options(self, rank: int, recipe: Recipe) -> dict[str, Any]:
        """Options of trainer `rank`'s actor."""
        return {
            "num_cpus": recipe.cluster.cpus_per_trainer,
            "num_gpus": _trainer_gpus(recipe),
            **self._at(1 + self.num_engines + rank),
        }

    def release(self) -> None:
        """Give the room back."""
        remove_placement_group(self.group)

    def _at(self, bundle: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=bundle,
            placement_group_capture_child_tasks=False,
        )
        return {"scheduling_strategy": strategy}


def _has_gpus() -> bool:
    return bool(ray.cluster_resources().get("GPU", 0))


def _engine_gpus(recipe: Recipe) -> float:
    gpus = recipe.engine.gpus_per_engine
    return gpus / 2 if gpus and recipe.cluster.colocate else gpus


def _trainer_gpus(recipe: Recipe) -> float:
    if not _has_gpus():
        return 0
    return 0.5 if recipe.cluster.colocate else 1


def reserve(recipe: Recipe) -> Placement:
    """Reserve one bundle per actor.

    Raises:
        RuntimeSetupError: the cluster has no such room within the deadline; the message names what
            was asked for and what is there.
    """
    num_engines, num_trainers = num_actors(recipe)
    bundles = [{"CPU": _MANAGER_CPUS}]
    bundles += [{"CPU": recipe.cluster.cpus_per_engine, "GPU": _engine_gpus(recipe)}] * num_engines
    bundles += [
        {"CPU": recipe.cluster.cpus_per_trainer, "GPU": _trainer_gpus(recipe)}
    ] * num_trainers
    bundles = [
        {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.01}
        for bundle in bundles
    ]
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(recipe.cluster.placement_timeout_seconds):
        remove_placement_group(group)
        total = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
        free = {name: ray.available_resources().get(name, 0) for name in total}
        raise RuntimeSetupError(
            f"no placement for {num_trainers} trainers and {num_engines} engines within"
            f" cluster.placement_timeout_seconds = {recipe.cluster.placement_timeout_seconds}:"
            f" asked for {total}, free are {free}; free resources or lower parallel.* and"
            " engine.count"
        )
    return Placement(group=group, num_engines=num_engines)
