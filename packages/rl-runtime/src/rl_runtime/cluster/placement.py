"""Reserve room for all actors of a run before any is started.

Invariants: a run has all of its room or none; waiting for it ends at
`cluster.placement_timeout_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import RuntimeSetupError

__all__ = ["Placement", "required_cpus", "reserve"]

_ROLLOUT_CPUS = 0.25
_SMALLEST = {"CPU": 0.01}
"""For an actor that asks for nothing: Ray refuses an empty bundle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The reserved room of a run: Ray's options for each of its actors."""

    group: PlacementGroup
    """Ray's placement group, one bundle per actor."""
    rollout: Mapping[str, Any]
    """Of the rollout actor: `num_cpus`, `num_gpus` and `scheduling_strategy`."""
    engines: Sequence[Mapping[str, Any]]
    """Of each engine's actor."""
    trainers: Sequence[Mapping[str, Any]]
    """Of each trainer rank's actor."""

    def release(self) -> None:
        """Give the room back."""
        remove_placement_group(self.group)


def required_cpus(recipe: Recipe) -> float:
    """Return the CPU cores that Ray counts for all actors of a run."""
    return math.fsum(bundle["CPU"] for bundle in _bundles(recipe, has_gpus=False))


def reserve(recipe: Recipe) -> Placement:
    """Reserve one bundle per actor.

    Raises:
        RuntimeSetupError: the cluster has no such room within the deadline; the message names what
            was asked for and what is there.
    """
    num_engines, num_trainers = _num_actors(recipe)
    bundles = _bundles(recipe, has_gpus=bool(ray.cluster_resources().get("GPU", 0)))
    asked = [
        {name: amount for name, amount in bundle.items() if amount} or _SMALLEST
        for bundle in bundles
    ]
    group = placement_group(asked, strategy="PACK")
    if not group.wait(recipe.cluster.placement_timeout_seconds):
        remove_placement_group(group)
        total = {name: sum(bundle.get(name, 0) for bundle in asked) for name in ("CPU", "GPU")}
        free = {name: ray.available_resources().get(name, 0) for name in total}
        raise RuntimeSetupError(
            f"no placement for {num_trainers} trainers and {num_engines} engines within"
            f" cluster.placement_timeout_seconds = {recipe.cluster.placement_timeout_seconds}:"
            f" asked for {total}, free are {free}; free resources or lower parallel.* and"
            " engine.count"
        )
    rollout, *others = [_options(group, index, bundle) for index, bundle in enumerate(bundles)]
    return Placement(
        group=group,
        rollout=rollout,
        engines=others[:num_engines],
        trainers=others[num_engines:],
    )


def _options(group: PlacementGroup, index: int, bundle: Mapping[str, float]) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group,
        placement_group_bundle_index=index,
        placement_group_capture_child_tasks=False,
    )
    return {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle["GPU"],
        "scheduling_strategy": strategy,
    }


def _num_actors(recipe: Recipe) -> tuple[int, int]:
    """Return how many engine actors and how many trainer actors a run has."""
    engines = 0 if recipe.engine.url or recipe.debug.load_rollout_dump else recipe.engine.count
    trainers = 0 if recipe.debug.rollout_only else recipe.parallel.world_size
    return engines, trainers


def _bundles(recipe: Recipe, *, has_gpus: bool) -> list[dict[str, float]]:
    num_engines, num_trainers = _num_actors(recipe)
    section = recipe.cluster
    # Side by side on the same devices, engines and trainers count as half of each.
    share = 0.5 if section.colocate else 1.0
    rollout = {"CPU": _ROLLOUT_CPUS, "GPU": 0.0}
    engine = {"CPU": section.cpus_per_engine, "GPU": share * recipe.engine.gpus_per_engine}
    trainer = {"CPU": section.cpus_per_trainer, "GPU": share * has_gpus}
    return [rollout, *[engine] * num_engines, *[trainer] * num_trainers]
