"""Room for actors: granted when the resources of this stand-in suffice, never later."""

from collections.abc import Mapping, Sequence

import ray


class PlacementGroup:
    def __init__(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> None:
        self.bundle_specs, self.strategy, self.removed = bundles, strategy, False

    def wait(self, timeout_seconds: float = 30) -> bool:
        del timeout_seconds
        return all(
            sum(bundle.get(name, 0) for bundle in self.bundle_specs) <= ray.RESOURCES.get(name, 0)
            for name in ("CPU", "GPU")
        )


def placement_group(
    bundles: Sequence[Mapping[str, float]], strategy: str = "PACK"
) -> PlacementGroup:
    return PlacementGroup(bundles, strategy)


def remove_placement_group(placement_group: PlacementGroup) -> None:
    placement_group.removed = True
