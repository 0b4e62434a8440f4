"""One step as the balancing algorithms see it, and what they answer.

Axis letters: N samples, D ranks, M slots, K = D * M bins, numbered rank by rank.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.bounds import CostBounds, cost_bounds, rank_bound
from rl_schedule.balancing.rank_assignment import fill_empty_bins
from rl_schedule.packing import bin_sums, fill_best_fit, fill_first_fit
from rl_schedule.statistics import rank_imbalance, slot_imbalance

__all__ = ["Assignment", "Candidate", "PlainPackings", "StepProblem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The micro-batch of each sample of one step.

    Example: 2 ranks, 1 slot, three samples, the second on rank 1: `bin_of = [0, 1, 0]`.
    """

    bin_of: IntArray
    """int64 [N]: bin `r * num_slots + k` is micro-batch k of rank r."""
    num_slots: int
    """Micro-batches per rank, M."""
    path: str
    """Which algorithms made it."""
    rank_slack: float = 0.0
    """Slack in use, a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One plan for a `StepProblem` and how good it is."""

    bin_of: IntArray
    """int64 [N], rank-major bin of each sample."""
    path: str
    """Which algorithms made it."""
    rank: float
    """Costliest rank over the mean."""
    slot: float
    """Slot sum over the mean, each rank's bins sorted by cost."""
    slack: float = 0.0
    """Slack in use, a fraction."""


class PlainPackings:
    """First-fit and best-fit packings of all samples, longest first; made once, when asked for."""

    def __init__(self, lengths: IntArray, cap: int) -> None:
        """Keep `lengths`, int64 [N] descending, and the cap."""
        self._lengths, self._cap = lengths.tolist(), cap

    @cached_property
    def first_fit(self) -> IntArray:
        """Bin of each sample by first-fit-decreasing, int64 [N]."""
        return np.asarray(fill_first_fit(self._lengths, self._cap), dtype=np.int64)

    @cached_property
    def best_fit(self) -> IntArray:
        """Bin of each sample by best-fit-decreasing, int64 [N]."""
        return np.asarray(fill_best_fit(self._lengths, self._cap), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProblem:
    """A step's samples (at least one), longest first, to be put into a fixed number of bins."""

    lengths: IntArray
    """int64 [N], padded tokens, descending."""
    costs: IntArray
    """int64 [N]."""
    cap: int
    """Tokens per bin."""
    num_ranks: int
    """Ranks, D."""
    num_slots: int
    """Bins per rank, M."""
    packings: PlainPackings
    """Plain packings of the same samples, shared by problems with other numbers of bins."""

    @property
    def num_bins(self) -> int:
        """K = D * M."""
        return self.num_ranks * self.num_slots

    @property
    def fill(self) -> float:
        """Tokens over the capacity of all bins."""
        return int(self.lengths.sum()) / (self.num_bins * self.cap)

    def num_longer(self, tokens: int) -> int:
        """Return how many samples are longer than `tokens`; they come first."""
        return int(np.searchsorted(-self.lengths, -tokens))

    def bounds(self) -> CostBounds:
        """Return what no plan for this problem can beat."""
        return cost_bounds(
            self.lengths, self.costs, self.cap, num_ranks=self.num_ranks, num_slots=self.num_slots
        )

    def rank_bound(self) -> float:
        """Return how far apart the ranks are at least: the costliest over the mean."""
        return rank_bound(
            self.lengths, self.costs, self.cap, num_ranks=self.num_ranks, num_slots=self.num_slots
        )

    def candidate(self, bin_of: IntArray, path: str, *, slack: float = 0.0) -> Candidate:
        """Give empty bins a sample where one can be spared, and measure the plan."""
        filled = fill_empty_bins(
            bin_of, self.costs, num_ranks=self.num_ranks, num_bins=self.num_bins
        )
        # Each rank's bins in order of cost, as they will run.
        cost_K = bin_sums(self.costs, filled, self.num_bins)
        cost_DM = np.sort(cost_K.reshape(self.num_ranks, self.num_slots), axis=1)
        return Candidate(
            bin_of=filled,
            path=path,
            rank=rank_imbalance(cost_DM),
            slot=slot_imbalance(cost_DM),
            slack=slack,
        )
