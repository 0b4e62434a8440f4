"""First fit for micro-batches that keep more than a token cap, one unit of samples after another.

Invariants: a micro-batch keeps every limit, unless it is one oversized unit alone; a split keeps
them too; bins come in opening order.

Axis letters: U units, K bins.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import IntArray
from rl_schedule.packing.bins import group_bins, number_bins
from rl_schedule.packing.units import Units

__all__ = ["Limits", "fill_limited", "split_limited"]

_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one micro-batch may hold."""

    most_tokens: int | None
    """Token cap; None = any number of tokens."""
    most_samples: int | None
    """Samples; None = any number."""
    padded: bool = False
    """Whether its tokens are its longest sample times the count, or the sum of its samples."""
    in_order: bool = False
    """Whether a unit only joins the bin that was opened last, so that bins are runs of units."""

    def footprint(self, tokens: IntArray, longest: IntArray, counts: IntArray) -> IntArray:
        """Return the tokens that are compared with the cap, for any shape of bins."""
        return longest * counts if self.padded else tokens

    def fits(self, tokens: IntArray, longest: IntArray, counts: IntArray) -> npt.NDArray[np.bool_]:
        """Tell which bins of this content keep the limits, bool."""
        footprint = self.footprint(tokens, longest, counts)
        kept: npt.NDArray[np.bool_] = (footprint <= (self.most_tokens or _NO_LIMIT)) & (
            counts <= (self.most_samples or _NO_LIMIT)
        )
        return kept


def fill_limited(units: Units, order: IntArray, limits: Limits) -> IntArray:
    """Put units, as they come, into the first opened bin that they fit; int64 [U], bin of each.

    O(U * K), in numpy over the bins. A unit of `order` that fits nowhere alone has its own bin.

    Args:
        units: what to pack.
        order: int64 [V], the units to pack, in packing order; others get bin -1.
        limits: what a bin may hold.
    """
    bin_of = np.full(units.first.size, -1, dtype=np.int64)
    tokens, longest, counts = np.zeros((3, max(1, order.size)), dtype=np.int64)
    opened = 0
    for unit in order.tolist():
        start = max(0, opened - 1) if limits.in_order else 0
        joined = slice(start, opened)
        found = limits.fits(
            tokens[joined] + units.tokens[unit],
            np.maximum(longest[joined], units.longest[unit]),
            counts[joined] + units.counts[unit],
        )
        target = start + int(found.argmax()) if found.any() else opened
        opened = max(opened, target + 1)
        bin_of[unit] = target
        tokens[target] += units.tokens[unit]
        longest[target] = max(longest[target], units.longest[unit])
        counts[target] += units.counts[unit]
    return bin_of


def split_limited(bin_of: IntArray, units: Units, limits: Limits, target: int) -> IntArray:
    """Split the bins that take most tokens until there are `target`, or only single units remain.

    Half of the units go to a new bin at the end: every second one, longest first, or the shorter
    half where micro-batches are padded to their longest sample.

    Args:
        bin_of: int64 [U], bins numbered from 0 without a gap; -1 for units that are in none.
        units: what was packed.
        limits: what a bin may hold; a part of a bin keeps them too.
        target: bins wanted.
    """
    chosen = np.flatnonzero(bin_of >= 0)
    bins = [chosen[members].tolist() for members in group_bins(bin_of[chosen])]

    def entry(number: int) -> tuple[int, int]:
        # Negative, because heapq pops the smallest; then the number: ties go to the first.
        members = bins[number]
        tokens, count = units.tokens[members], units.counts[members]
        taken = limits.footprint(tokens.sum(), units.longest[members].max(), count.sum())
        return -int(taken), number

    heap = [entry(number) for number, members in enumerate(bins) if len(members) > 1]
    heapq.heapify(heap)
    while len(bins) < target and heap:
        _, number = heapq.heappop(heap)
        members = sorted(bins[number], key=lambda unit: (-int(units.longest[unit]), unit))
        half = (len(members) + 1) // 2
        parts = (members[:half], members[half:]) if limits.padded else (members[::2], members[1::2])
        bins[number] = sorted(parts[0])
        bins.append(sorted(parts[1]))
        for place in (number, len(bins) - 1):
            if len(bins[place]) > 1:
                heapq.heappush(heap, entry(place))
    split = np.full_like(bin_of, -1)
    split[chosen] = number_bins(
        [np.searchsorted(chosen, members).tolist() for members in bins], chosen.size
    )
    return split
