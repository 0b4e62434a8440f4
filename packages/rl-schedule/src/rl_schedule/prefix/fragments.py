"""The samples of a step with their prefixes, and how groups are cut to what fits.

A fragment is some samples of one prefix that travel together. Cutting a group costs another copy of
its prefix, so a group is cut as rarely as the cap and the evenness of ranks ask for.

Invariants: every sample is in exactly one fragment; a fragment with its prefix never exceeds the
cap unless it is one oversized sample alone.

Axis letters: N samples, G prefixes, F fragments.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.packing import bin_sums, fill_first_fit, group_bins

__all__ = ["Fragments", "SharedStep", "cut_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """One step's samples and the prefixes they share, in exact integers."""

    responses: IntArray
    """int64 [N]: tokens after the prefix."""
    costs: IntArray
    """int64 [N]: cost of the response after its prefix."""
    prefix_of: IntArray
    """int64 [N]: prefix of each sample, 0..G-1 in first-occurrence order."""
    prefix_tokens: IntArray
    """int64 [G]."""
    prefix_costs: IntArray
    """int64 [G]."""
    cap: int
    """Tokens per micro-batch."""
    num_ranks: int
    """Ranks, D."""
    alignment: int
    """What the number of micro-batches is a multiple of."""
    may_leave_empty: bool
    """Whether a micro-batch may stay empty where filling it costs the slowest rank something."""

    @property
    def totals(self) -> IntArray:
        """Tokens of whole samples, int64 [N]."""
        return self.responses + self.prefix_tokens[self.prefix_of]

    @property
    def total_costs(self) -> IntArray:
        """Cost of whole samples, int64 [N]."""
        return self.costs + self.prefix_costs[self.prefix_of]

    def fewest_copies(self) -> IntArray:
        """Return how many micro-batches each prefix needs at least, int64 [G].

        One for every oversized sample, and the tokens of the others over the room beside the
        prefix.
        """
        fits = self.totals <= self.cap
        count = self.prefix_tokens.size
        tokens = bin_sums(np.where(fits, self.responses, 0), self.prefix_of, count)
        room = np.maximum(self.cap - self.prefix_tokens, 1)
        alone: IntArray = np.bincount(self.prefix_of[~fits], minlength=count)
        copies: IntArray = alone - (-tokens // room)
        return copies

    def least_rank_cost(self) -> int:
        """Return what the costliest rank costs at least: the mean, or the costliest sample."""
        work = int(self.costs.sum()) + int((self.prefix_costs * self.fewest_copies()).sum())
        return max(-(-work // self.num_ranks), int(self.total_costs.max()))

    def least_micro_batches(self) -> int:
        """Return how many micro-batches the step needs at least, over all ranks, not aligned."""
        fits = self.totals <= self.cap
        oversized = self.prefix_of[~fits]
        copies = self.fewest_copies() - np.bincount(oversized, minlength=self.prefix_tokens.size)
        tokens = int(self.responses[fits].sum()) + int((copies * self.prefix_tokens).sum())
        return oversized.size + -(-tokens // self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragments:
    """Samples that travel together, F lists of them."""

    prefixes: list[int]
    """[F]: the prefix that the samples share."""
    members: list[list[int]]
    """[F]: samples of the step, 0-based; none of them empty."""

    def tokens(self, step: SharedStep) -> IntArray:
        """Return the tokens of each fragment with its prefix, int64 [F]."""
        tokens: IntArray = step.prefix_tokens[self.prefixes] + self._sums(step.responses)
        return tokens

    def costs(self, step: SharedStep) -> IntArray:
        """Return the cost of each fragment with its prefix, int64 [F]."""
        return step.prefix_costs[self.prefixes] + self._sums(step.costs)

    def _sums(self, values: IntArray) -> IntArray:
        flat = np.fromiter((i for one in self.members for i in one), dtype=np.int64)
        starts = np.cumsum([0, *(len(one) for one in self.members[:-1])])
        # reduceat: one sum for each fragment's run of samples.
        sums: IntArray = np.add.reduceat(values[flat], starts)
        return sums


def cut_groups(step: SharedStep, *, most_cost: int) -> Fragments:
    """Cut each group into fragments under the cap that cost about `most_cost` at most.

    Longest response first into the first fragment with room, so that all but the last fragment of a
    group are nearly full. A single sample may cost more.
    """
    longest_first = np.argsort(-step.responses, kind="stable")
    prefixes: list[int] = []
    members: list[list[int]] = []
    groups = group_bins(step.prefix_of[longest_first], step.prefix_tokens.size)
    for prefix, places in enumerate(groups):
        for fragment in _cut(step, prefix, longest_first[places], most_cost):
            prefixes.append(prefix)
            members.append(fragment)
    return Fragments(prefixes=prefixes, members=members)


def _cut(step: SharedStep, prefix: int, samples: IntArray, most_cost: int) -> Iterator[list[int]]:
    """Yield the fragments of one group; its samples come longest first."""
    lengths = step.responses[samples].tolist()
    tokens, cost = sum(lengths), int(step.costs[samples].sum())
    # At least 1, which holds nothing beside a response of the smallest size: each is then alone.
    widest = max(step.cap - int(step.prefix_tokens[prefix]), 1)
    room = widest
    budget = most_cost - int(step.prefix_costs[prefix])
    if cost > budget:
        # As many tokens as the budget buys at the group's own price, but room for any one sample.
        room = min(widest, max(tokens * max(budget, 0) // cost, lengths[0]))
    fits = int(step.prefix_tokens[prefix]) + tokens <= step.cap
    if tokens <= room and (fits or len(lengths) == 1):
        yield samples.tolist()
        return
    for places in group_bins(np.asarray(fill_first_fit(lengths, room), dtype=np.int64)):
        yield samples[places].tolist()
