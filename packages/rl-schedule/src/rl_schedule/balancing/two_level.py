"""Packing and dealing in one pass: two-level longest-processing-time under the token cap; algorithm
layer.

Decides, sample by sample and longest first, which rank and which of its micro-batches takes the
next sample. Invariants: the cap is never exceeded except by an oversized sample alone; bin `r *
num_slots + k` belongs to rank r; the result is a function of the arguments alone.

Lengths only fall, so a micro-batch without room for one sample gets room for a later one exactly
once: a blocked micro-batch or rank is moved back at most once per placement, and the pass is O(n
log K).
"""

import heapq
from dataclasses import dataclass

__all__ = ["LptState", "two_level_lpt"]


@dataclass(slots=True, kw_only=True)
class LptState:
    """Where a pass starts: what the bins hold already. Bins are numbered rank by rank."""

    num_ranks: int
    """Ranks, D."""
    num_slots: int
    """Micro-batches per rank, m."""
    load: list[int]
    """[D] cost of each rank so far, plus its head start when it is to end below the others."""
    gap: list[int]
    """[D * m] cost of each bin minus the cost it should reach."""
    room: list[int]
    """[D * m] tokens each bin can still take; negative where an oversized sample sits."""

    @classmethod
    def empty(
        cls,
        *,
        num_ranks: int,
        num_slots: int,
        cap: int,
        targets: list[int],
        head_start: list[int] | None = None,
    ) -> "LptState":
        """Return a state in which nothing is placed; `targets` [m] is the cost each slot should reach."""
        return cls(
            num_ranks=num_ranks,
            num_slots=num_slots,
            load=list(head_start) if head_start is not None else [0] * num_ranks,
            gap=[-target for target in targets] * num_ranks,
            room=[cap] * (num_ranks * num_slots),
        )


def two_level_lpt(
    lengths: list[int], costs: list[int], state: LptState, cap: int
) -> list[int] | None:
    """Place samples, longest first, on the least loaded rank with room, in its bin furthest below
    target with room.

    Args:
        lengths: tokens [n], descending.
        costs: cost of each sample [n].
        state: the bins so far; used up by the call.
        cap: tokens per bin. A longer sample needs an empty bin and closes it.

    Returns:
        The bin of each sample [n], or None when a sample fits nowhere.
    """
    # A heap entry is one integer, key * width + index: it orders like the pair and compares much
    # faster.
    slots, room, ranks = state.num_slots, state.room, state.num_ranks
    width = ranks * slots
    active = [load * ranks + rank for rank, load in enumerate(state.load)]
    open_bins = [
        [state.gap[b] * width + b for b in range(rank * slots, (rank + 1) * slots)]
        for rank in range(ranks)
    ]
    for entries in (active, *open_bins):
        heapq.heapify(entries)
    blocked: list[tuple[int, int]] = []
    full_bins: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    pop, push, replace = heapq.heappop, heapq.heappush, heapq.heapreplace
    chosen = [0] * len(lengths)
    needs = [min(length, cap) for length in lengths]
    for sample, need in enumerate(needs):
        while blocked and -blocked[0][0] >= need:
            push(active, pop(blocked)[1])
        while True:
            if not active:
                return None
            entry = active[0]
            rank = entry % ranks
            bins, full = open_bins[rank], full_bins[rank]
            while full and -full[0][0] >= need:
                push(bins, pop(full)[1])
            while bins and room[bins[0] % width] < need:
                tight = pop(bins)
                push(full, (-room[tight % width], tight))
            if bins:
                break
            pop(active)
            push(blocked, (full[0][0], entry))
        target = bins[0] % width
        replace(bins, bins[0] + costs[sample] * width)
        replace(active, entry + costs[sample] * ranks)
        room[target] -= lengths[sample]
        chosen[sample] = target
    return chosen
