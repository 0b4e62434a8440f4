"""Where the samples of one step run; record layer."""

from dataclasses import dataclass

from rl_schedule.arrays import IntArray

__all__ = ["Assignment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The micro-batch of each sample of one step.

    Example: 2 ranks, 1 slot, three samples, the second on rank 1: `bin_of = [0, 1, 0]`.
    """

    bin_of: IntArray
    """int64 [n]: bin `r * num_slots + k` is micro-batch k of rank r."""
    num_ranks: int
    """Ranks."""
    num_slots: int
    """Micro-batches per rank."""
    path: str
    """Which algorithms made it."""
    rank_slack: float = 0.0
    """Slack in use, a fraction."""
