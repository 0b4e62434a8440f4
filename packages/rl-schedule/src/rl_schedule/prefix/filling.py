"""Empty micro-batches get a sample, as long as that slows nobody.

Every rank runs the same number of micro-batches, so what is left empty runs as a filler. Filling
one is free where two trees share a micro-batch of the same rank, else it costs a copy of a prefix.

Invariants: no micro-batch becomes empty; no rank ends above the limit; with no limit none stays
empty while another holds two samples.
"""

from rl_schedule.prefix.forest import Forest

__all__ = ["fill_empty_bins"]


def fill_empty_bins(forest: Forest, *, most: int | None) -> None:
    """Give empty bins a tree, half of a tree, or a single sample.

    Of the bin's own rank: a tree of a bin that has two, else half of the tree whose prefix costs
    least. Else, of another rank, the sample that costs least with its prefix.

    Args:
        forest: the bins; changed.
        most: cost up to which a rank may get by that; None = any.
    """
    limit = sum(forest.loads) + sum(forest.prefix_costs) * len(forest.trees)
    limit = limit if most is None else most
    filling = _Filling(forest, limit)
    empty = [number for number, trees in enumerate(forest.trees) if not trees]
    # Again while something was filled: a rank that gave a sample has room under the limit.
    while empty:
        left = [number for number in empty if not filling.fill(number)]
        if len(left) == len(empty):
            return
        empty = left


class _Filling:
    """Who can spare what."""

    def __init__(self, forest: Forest, limit: int) -> None:
        self.forest, self.limit = forest, limit
        self.home = {
            sample: (prefix, number)
            for number, trees in enumerate(forest.trees)
            for prefix, members in trees.items()
            for sample in members
        }
        # Cheapest with its prefix last. A sample that is alone in its bin stays alone.
        self.spare = sorted(self.home, key=lambda sample: (-self._alone_cost(sample), sample))

    def fill(self, target: int) -> bool:
        """Fill one bin; tell whether something could."""
        rank = target // self.forest.num_slots
        moved = self._from_own_rank(rank) or self._from_other_rank(rank)
        for sample in moved:
            prefix, source = self.home[sample]
            self.forest.add(sample, prefix, target)
            self.forest.remove(sample, prefix, source)
            self.home[sample] = prefix, target
        return bool(moved)

    def _alone_cost(self, sample: int) -> int:
        return self.forest.costs[sample] + self.forest.prefix_costs[self.home[sample][0]]

    def _from_own_rank(self, rank: int) -> list[int]:
        forest = self.forest
        bins = [forest.trees[number] for number in forest.bins(rank)]
        several = [trees for trees in bins if len(trees) > 1]
        if several:
            # The one with the fewest samples of the bin with most trees.
            fewest = min(max(several, key=len).values(), key=len)
            return list(fewest)
        large = [
            (forest.prefix_costs[prefix], members)
            for trees in bins
            for prefix, members in trees.items()
            if len(members) > 1
        ]
        if not large:
            return []
        cost, members = min(large)
        return members[1::2] if forest.loads[rank] + cost <= self.limit else []

    def _from_other_rank(self, rank: int) -> list[int]:
        trees = self.forest.trees
        while self.spare:
            sample = self.spare[-1]
            if sum(map(len, trees[self.home[sample][1]].values())) > 1:
                affordable = self.forest.loads[rank] + self._alone_cost(sample) <= self.limit
                return [sample] if affordable else []
            self.spare.pop()
        return []
