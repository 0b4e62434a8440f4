"""Room for actors: granted when the resources of this stand-in suffice, never later."""

import ray


class PlacementGroup:
    def __init__(self, bundles, strategy) -> None:
        self.bundle_specs, self.strategy, self.removed = bundles, strategy, False

    def wait(self, timeout_seconds=30):
        del timeout_seconds
        return all(sum(bundle.get(name, 0) for bundle in self.bundle_specs) <= ray.RESOURCES.get(name, 0) for name in ("CPU", "GPU"))


def placement_group(bundles, strategy="PACK"):
    return PlacementGroup(bundles, strategy)


def remove_placement_group(placement_group) -> None:
    placement_group.removed = True
