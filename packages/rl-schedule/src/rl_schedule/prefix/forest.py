"""Micro-batches of trees under exchange, until ranks are level.

A move of a response to another micro-batch is free where its prefix is there already; elsewhere it
costs another copy of the prefix, and saves one where the last response of a tree leaves.

Invariants: the cap holds; levelling leaves no micro-batch empty that was not, and neither it nor a
merger raises the costliest rank; bounded by counts, never by time.

Axis letters: D ranks, M slots, K = D * M bins, numbered rank by rank.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from rl_schedule.arrays import IntArray
from rl_schedule.prefix.fragments import Fragments, SharedStep

__all__ = ["Forest", "PlacedTree"]

_ROUNDS = 20
"""Rounds of pairing at most."""

_MOST_PAIRS = 600
"""Pairs of ranks tried at most for one forest: some 50 ms."""

_MOST_OTHERS = 32
"""Cheapest ranks that are tried for the costliest one where no pair of a round could trade."""

_CLOSE = 4000
"""Stop when the costliest rank is within 1 / _CLOSE of the mean."""

_MOST_HOMES = 3
"""Bins of the cheap rank that are tried for a response whose prefix they have, roomiest first."""

_COARSE = 4
"""Swaps are tried where no move closes a quarter of the gap."""

_NEIGHBOURS = 2
"""Trees tried on either side of the cost that would close the gap; the cap may forbid the next."""


class _Move(NamedTuple):
    """Responses that change places between two bins, of one prefix each way."""

    gained: int
    """By how much the costlier of the two ranks gets cheaper; <= 0: nothing."""
    source: int = 0
    """Bin of the costly rank."""
    target: int = 0
    """Bin of the cheap rank."""
    prefix: int = 0
    """Prefix of the samples that leave `source`."""
    give: tuple[int, ...] = ()
    """Those samples."""
    other: int = 0
    """Prefix of the samples that come back."""
    take: tuple[int, ...] = ()
    """Those samples; may be none."""


class PlacedTree(NamedTuple):
    """One tree and where it stands."""

    cost: int
    """With its prefix."""
    tokens: int
    """With its prefix."""
    number: int
    """Its bin."""
    prefix: int
    members: tuple[int, ...]
    """Samples, costliest first."""


class Forest:
    """The trees of every bin, with the tokens of bins and the costs of ranks."""

    def __init__(
        self, step: SharedStep, fragments: Fragments, bin_of: IntArray, num_slots: int
    ) -> None:
        """Plant fragments into bins, `bin_of` int64 [F]; those of one prefix grow together."""
        self.num_ranks, self.num_slots, self.cap = step.num_ranks, num_slots, step.cap
        # Plain lists: the loops below read one number at a time.
        self.responses: list[int] = step.responses.tolist()
        self.costs: list[int] = step.costs.tolist()
        self.prefix_tokens: list[int] = step.prefix_tokens.tolist()
        self.prefix_costs: list[int] = step.prefix_costs.tolist()
        self.trees: list[dict[int, list[int]]] = [{} for _ in range(self.num_ranks * num_slots)]
        self.tokens = [0] * len(self.trees)
        self.loads = [0] * self.num_ranks
        self.pairs_left = _MOST_PAIRS
        placed = zip(fragments.prefixes, fragments.members, bin_of.tolist(), strict=True)
        for prefix, members, number in placed:
            for sample in members:
                self.add(sample, prefix, number)
        for trees in self.trees:
            for tree in trees.values():
                tree.sort(key=self._costliest_first)

    def merge_trees(self, *, may_empty: bool) -> bool:
        """Bring trees of one prefix on one rank together where the cap allows it.

        Each merger saves a copy of the prefix.

        Args:
            may_empty: whether a micro-batch may be left empty by that.

        Returns:
            Whether there was one.
        """
        merged = False
        for rank in range(self.num_ranks):
            homes: dict[int, list[int]] = {}
            for number in self.bins(rank):
                for prefix in self.trees[number]:
                    homes.setdefault(prefix, []).append(number)
            for prefix, numbers in homes.items():
                merged |= len(numbers) > 1 and self._merge(prefix, numbers, may_empty=may_empty)
        return merged

    def _merge(self, prefix: int, numbers: list[int], *, may_empty: bool) -> bool:
        """Merge what fits of one prefix's trees in bins of one rank, fewest tokens first."""
        merged = False
        by_tokens = sorted(numbers, key=lambda number: (self.tokens[number], number))
        for place, source in enumerate(by_tokens):
            if len(self.trees[source]) == 1 and not may_empty:
                continue
            members = self.trees[source][prefix]
            needed = sum(self.responses[sample] for sample in members)
            for target in by_tokens[place + 1 :]:
                if self.tokens[target] + needed <= self.cap:
                    self.move(prefix, list(members), source, target)
                    merged = True
                    break
        return merged

    def move(self, prefix: int, samples: Iterable[int], source: int, target: int) -> None:
        """Move samples of one prefix to another bin."""
        for sample in samples:
            self.add(sample, prefix, target)
            self.remove(sample, prefix, source)
        self.trees[target][prefix].sort(key=self._costliest_first)

    def level(self) -> None:
        """Move responses from costly to cheap ranks until they are level or nothing helps."""
        for _ in range(_ROUNDS):
            total = sum(self.loads)
            # max / mean <= 1 + 1 / _CLOSE, in integers.
            by_load = sorted(range(self.num_ranks), key=lambda rank: (-self.loads[rank], rank))
            costly = [
                rank
                for rank in by_load[: self.num_ranks // 2]
                if (self.loads[rank] * self.num_ranks - total) * _CLOSE > total
            ]
            pairs = list(zip(costly, by_load[::-1], strict=False))[: self.pairs_left]
            self.pairs_left -= len(pairs)
            # A list first, so that every pair gets its turn in every round.
            exchanged = [self._exchange(heavy, light) for heavy, light in pairs]
            if any(exchanged):
                continue
            # The costliest rank decides how long the step takes, so others may help it too.
            others = by_load[:0:-1][: min(self.pairs_left, _MOST_OTHERS) if costly else 0]
            self.pairs_left -= len(others)
            if not any(self._exchange(by_load[0], other) for other in others):
                return

    def _costliest_first(self, sample: int) -> tuple[int, int]:
        return -self.costs[sample], sample

    def bins(self, rank: int) -> range:
        """Return the bins of a rank."""
        return range(rank * self.num_slots, (rank + 1) * self.num_slots)

    def add(self, sample: int, prefix: int, number: int) -> None:
        """Add a sample to a bin, with its prefix if that is not there yet."""
        rank = number // self.num_slots
        if prefix not in self.trees[number]:
            self.trees[number][prefix] = []
            self.tokens[number] += self.prefix_tokens[prefix]
            self.loads[rank] += self.prefix_costs[prefix]
        self.trees[number][prefix].append(sample)
        self.tokens[number] += self.responses[sample]
        self.loads[rank] += self.costs[sample]

    def remove(self, sample: int, prefix: int, number: int) -> None:
        """Remove a sample from a bin, and its prefix with the last one."""
        rank = number // self.num_slots
        tree = self.trees[number][prefix]
        tree.remove(sample)
        self.tokens[number] -= self.responses[sample]
        self.loads[rank] -= self.costs[sample]
        if not tree:
            del self.trees[number][prefix]
            self.tokens[number] -= self.prefix_tokens[prefix]
            self.loads[rank] -= self.prefix_costs[prefix]

    def _exchange(self, heavy: int, light: int) -> bool:
        """Make the best move from one rank to another; tell whether anything moved."""
        gap = self.loads[heavy] - self.loads[light]
        homes: dict[int, list[int]] = {}
        for number in sorted(self.bins(light), key=lambda number: (self.tokens[number], number)):
            for prefix in self.trees[number]:
                homes.setdefault(prefix, []).append(number)
        homes = {prefix: bins[:_MOST_HOMES] for prefix, bins in homes.items()}
        best = self._best_move(heavy, light, gap, homes)
        if best.gained * _COARSE < gap:
            swaps = chain(self._swaps(heavy, gap, homes), self._tree_swaps(heavy, light, gap))
            best = max(chain([best], swaps), key=lambda move: move.gained)
        if best.gained <= 0:
            return False
        self.move(best.prefix, best.give, best.source, best.target)
        if best.take:
            self.move(best.other, best.take, best.target, best.source)
        return True

    def _best_move(self, heavy: int, light: int, gap: int, homes: dict[int, list[int]]) -> _Move:
        """Find the responses of one tree that bring two ranks closest together by moving."""
        best = _Move(0)
        # The first of equals.
        roomiest = min(self.bins(light), key=lambda number: self.tokens[number])
        for source in self.bins(heavy):
            for prefix, members in self.trees[source].items():
                targets = [(number, 0) for number in homes.get(prefix, ())]
                if prefix not in self.trees[roomiest]:
                    targets.append((roomiest, self.prefix_costs[prefix]))
                for target, paid in targets:
                    # Half of what is left of the gap is the most that can be gained.
                    if (gap - paid) // 2 > best.gained:
                        give = self._fitting(members, target, prefix, (gap - paid) // 2)
                        gained = self._gained(source, prefix, give, gap, paid)
                        if gained > best.gained:
                            best = _Move(gained, source, target, prefix, give)
        return best

    def _fitting(
        self, members: list[int], target: int, prefix: int, budget: int
    ) -> tuple[int, ...]:
        """Choose members, costliest first, within a budget of cost and the room of a bin."""
        room = self.cap - self.tokens[target]
        if prefix not in self.trees[target]:
            room -= self.prefix_tokens[prefix]
        give = []
        for sample in members:
            if self.costs[sample] <= budget and self.responses[sample] <= room:
                budget -= self.costs[sample]
                room -= self.responses[sample]
                give.append(sample)
        return tuple(give)

    def _gained(self, source: int, prefix: int, give: tuple[int, ...], gap: int, paid: int) -> int:
        """Return by how much the costlier rank gets cheaper; 0 where a bin would be emptied."""
        moved = sum(self.costs[sample] for sample in give)
        saved = 0
        if len(give) == len(self.trees[source][prefix]):
            if len(self.trees[source]) == 1:
                return 0
            saved = self.prefix_costs[prefix]
        return min(moved + saved, gap - moved - paid)

    def _swaps(self, heavy: int, gap: int, homes: dict[int, list[int]]) -> Iterator[_Move]:
        """Yield exchanges of two responses whose prefix both ranks have: no copy is paid."""
        for source in self.bins(heavy):
            source_room = self.cap - self.tokens[source]
            for prefix, members in self.trees[source].items():
                for target in homes.get(prefix, ()):
                    partners = self.trees[target][prefix]
                    target_room = self.cap - self.tokens[target]
                    for give in members:
                        # Half of the gap cheaper is best; the partners next to that cost are tried.
                        ideal = gap // 2 - self.costs[give]
                        at = bisect_left(partners, ideal, key=lambda take: -self.costs[take])
                        for take in partners[max(at - 1, 0) : at + 1]:
                            dearer = self.costs[give] - self.costs[take]
                            longer = self.responses[give] - self.responses[take]
                            if -source_room <= longer <= target_room:
                                gained = min(dearer, gap - dearer)
                                yield _Move(
                                    gained, source, target, prefix, (give,), prefix, (take,)
                                )

    def _tree_swaps(self, heavy: int, light: int, gap: int) -> Iterator[_Move]:
        """Yield exchanges of two whole trees: no copy is paid either."""
        takes = sorted(self.trees_of(light), key=lambda tree: tree.cost)
        for give in self.trees_of(heavy):
            at = bisect_left(takes, give.cost - gap // 2, key=lambda tree: tree.cost)
            for take in takes[max(at - _NEIGHBOURS, 0) : at + _NEIGHBOURS]:
                longer = give.tokens - take.tokens
                if (
                    self.tokens[take.number] + longer <= self.cap
                    and self.tokens[give.number] - longer <= self.cap
                ):
                    dearer = give.cost - take.cost
                    yield _Move(
                        min(dearer, gap - dearer),
                        give.number,
                        take.number,
                        give.prefix,
                        give.members,
                        take.prefix,
                        take.members,
                    )

    def trees_of(self, rank: int) -> list[PlacedTree]:
        """List the trees of a rank, bin by bin."""
        return [
            PlacedTree(
                self.prefix_costs[prefix] + sum(self.costs[sample] for sample in members),
                self.prefix_tokens[prefix] + sum(self.responses[sample] for sample in members),
                number,
                prefix,
                tuple(members),
            )
            for number in self.bins(rank)
            for prefix, members in self.trees[number].items()
        ]
