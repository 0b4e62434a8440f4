"""Packing and dealing in one pass: longest processing time first, on two levels, under the cap.

Longest sample first, the next one goes to the rank that has least to do, and there into the
micro-batch furthest below its target, among those with room.

Invariants: the cap is never exceeded except by an oversized sample alone; bin `r * M + k` belongs
to rank r; the result is a function of the arguments alone.

Axis letters: N samples, D ranks, M slots, K = D * M bins.
"""

import heapq
from dataclasses import dataclass

__all__ = ["LptState", "two_level_lpt"]


@dataclass(slots=True, kw_only=True)
class LptState:
    """What the bins hold already where a pass starts. Bins are numbered rank by rank."""

    num_ranks: int
    """Ranks, D."""
    num_slots: int
    """Micro-batches per rank, M."""
    load: list[int]
    """[D] cost of each rank so far, plus its head start when it is to end below the others."""
    gap: list[int]
    """[K] cost of each bin minus the cost it should reach."""
    room: list[int]
    """[K] tokens each bin can still take; negative where an oversized sample sits."""

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
        """Return a state without samples; `targets` [M] is the cost each slot should reach."""
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
    """Place samples on the least loaded rank with room, in its bin furthest below target with room.

    O(N log K): lengths only fall, so a bin without room for one sample gets room for a later one
    exactly once, and is set aside until then.

    Args:
        lengths: tokens [N], descending.
        costs: cost of each sample [N].
        state: the bins so far; used up by the call.
        cap: tokens per bin. A longer sample needs an empty bin and closes it.

    Returns:
        The bin of each sample [N], or None when a sample fits nowhere.
    """
    slots, room, ranks = state.num_slots, state.room, state.num_ranks
    num_bins = ranks * slots
    # A heap entry is one integer, key * width + index: it orders like the pair (key, index) and
    # compares much faster. entry % width is the index, also for a negative key.
    active = [load * ranks + rank for rank, load in enumerate(state.load)]
    open_bins = [
        [state.gap[b] * num_bins + b for b in range(rank * slots, (rank + 1) * slots)]
        for rank in range(ranks)
    ]
    for entries in (active, *open_bins):
        heapq.heapify(entries)
    # Set aside, most room first: ranks with (-room of their roomiest bin, entry in `active`), and
    # per rank bins with (-room, entry in `open_bins`).
    blocked: list[tuple[int, int]] = []
    full_bins: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    pop, push, replace = heapq.heappop, heapq.heappush, heapq.heapreplace
    chosen = [0] * len(lengths)
    # An oversized sample needs all of a bin's cap, so only an empty bin will do.
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
            while bins and room[bins[0] % num_bins] < need:
                tight = pop(bins)
                push(full, (-room[tight % num_bins], tight))
            if bins:
                break
            # None of this rank's bins has room: it waits for a sample as short as its roomiest bin.
            pop(active)
            push(blocked, (full[0][0], entry))
        target = bins[0] % num_bins
        # Both are the least of their heap; adding cost * width raises the key, keeps the index.
        replace(bins, bins[0] + costs[sample] * num_bins)
        replace(active, entry + costs[sample] * ranks)
        room[target] -= lengths[sample]
        chosen[sample] = target
    return chosen
