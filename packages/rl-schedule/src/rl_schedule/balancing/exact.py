"""Branch and bound for steps of a handful of samples, too few for greedy methods to even out.

Invariants: the cap holds; no bin stays empty while there are samples enough; at most `_MOST_NODES`
placements are tried, so the result is bounded by counts and optimal whenever the search ends before
that.
"""

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.problem import StepProblem
from rl_schedule.packing import bin_sums, number_bins

__all__ = ["MOST_SAMPLES", "search_exactly"]

MOST_SAMPLES = 12
"""Steps with more samples are not searched."""

_MOST_NODES = 5_000
"""Placements tried at most: some 30 ms."""


def search_exactly(problem: StepProblem, start: IntArray) -> IntArray | None:
    """Look for a plan whose costliest rank is cheaper than that of `start`.

    Depth first, longest sample first, onto the cheapest rank first; a branch ends where a rank
    reaches the best so far, and ranks and bins that look alike are tried once.

    Returns:
        Rank-major bins, int64 [N], or None.
    """
    search = _Search(
        problem, int(bin_sums(problem.costs, start // problem.num_slots, problem.num_ranks).max())
    )
    search.descend(0)
    return None if search.best is None else number_bins(search.best, problem.lengths.size)


class _Search:
    """The placement under construction, and the best one found."""

    def __init__(self, problem: StepProblem, limit: int) -> None:
        self.lengths, self.costs = problem.lengths.tolist(), problem.costs.tolist()
        self.cap, self.slots, self.ranks = problem.cap, problem.num_slots, problem.num_ranks
        self.limit = limit
        # Nobody beats the mean, nor the costliest sample: a plan that good ends the search.
        self.floor = max(-(-int(problem.costs.sum()) // problem.num_ranks), *self.costs)
        self.loads = [0] * problem.num_ranks
        self.rooms = [problem.cap] * problem.num_bins
        self.members: list[list[int]] = [[] for _ in range(problem.num_bins)]
        self.nodes = 0
        self.best: list[list[int]] | None = None

    def descend(self, sample: int) -> None:
        """Place `sample` and all after it in every way that may still be better."""
        if sample == len(self.lengths):
            self.limit = max(self.loads)
            self.best = [list(members) for members in self.members]
            return
        for target in self._choices(sample):
            if self.nodes >= _MOST_NODES or self.limit <= self.floor:
                return
            rank = target // self.slots
            if self.loads[rank] + self.costs[sample] >= self.limit:
                continue
            self.nodes += 1
            self._put(sample, target, 1)
            self.descend(sample + 1)
            self._put(sample, target, -1)

    def _choices(self, sample: int) -> list[int]:
        """Return the bins to try, cheapest rank first, one of those that look alike."""
        need = min(self.lengths[sample], self.cap)
        # With as many samples left as empty bins, each of them has to open one.
        must_open = len(self.lengths) - sample <= self.members.count([])
        found: dict[tuple[object, ...], int] = {}
        for rank in range(self.ranks):
            rooms = self.rooms[rank * self.slots : (rank + 1) * self.slots]
            # Ranks of equal load and rooms, and bins of equal room in them, lead to the same plans.
            looks = (self.loads[rank], *sorted(rooms))
            for place, room in enumerate(rooms):
                target = rank * self.slots + place
                if room >= need and not (must_open and self.members[target]):
                    found.setdefault((looks, room), target)
        return sorted(found.values(), key=lambda target: (self.loads[target // self.slots], target))

    def _put(self, sample: int, target: int, sign: int) -> None:
        """Place (`sign` 1) a sample, or take back (-1) the one placed last."""
        if sign > 0:
            self.members[target].append(sample)
        else:
            self.members[target].pop()
        self.loads[target // self.slots] += sign * self.costs[sample]
        self.rooms[target] -= sign * self.lengths[sample]
