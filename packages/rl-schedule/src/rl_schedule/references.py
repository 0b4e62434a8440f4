"""Plain methods to compare with: what other schedulers do, written here; layer above `packing` and
`dealing`.

Decides nothing for a plan. Used by `rl-schedule compare` and the benchmarks. Each keeps the token
cap; they differ in how they pack and deal. Invariant: every reference ends with the same number of
micro-batches on every rank.
"""

from dataclasses import dataclass

import numpy as np

from rl_schedule.alignment import round_up, split_bins
from rl_schedule.arrays import IntArray
from rl_schedule.dealing import arrange_slots, deal_bins, number_bins
from rl_schedule.packing import decreasing_order, fill_first_fit, group_bins

__all__ = ["REFERENCES", "Reference", "run_reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One published way to pack and deal."""

    name: str
    """For tables."""
    decreasing: bool
    """Pack longest first instead of in arrival order."""
    differencing: bool
    """Deal by Karmarkar-Karp on micro-batch costs instead of in turn, then sort each rank's micro-batches by cost."""


REFERENCES: tuple[Reference, ...] = (
    Reference(name="first-fit + strided", decreasing=False, differencing=False),
    Reference(name="first-fit + KK", decreasing=False, differencing=True),
    Reference(name="FFD + KK", decreasing=True, differencing=True),
)
"""Naive first, strongest last."""


def run_reference(
    reference: Reference,
    lengths: IntArray,
    costs: IntArray,
    *,
    cap: int,
    num_ranks: int,
    alignment: int,
) -> tuple[IntArray, int]:
    """Pack and deal one step.

    Args:
        reference: the method.
        lengths: int64 [n].
        costs: int64 [n].
        cap: tokens per micro-batch.
        num_ranks: ranks.
        alignment: the micro-batch count is a multiple of this.

    Returns:
        The rank-major bin of each sample, int64 [n], and the number of bins.
    """
    order = decreasing_order(lengths) if reference.decreasing else np.arange(lengths.size)
    bin_of = np.empty(lengths.size, dtype=np.int64)
    bin_of[order] = fill_first_fit(lengths[order].tolist(), cap)
    bins = group_bins(bin_of)
    needed = round_up(len(bins), alignment)
    split = number_bins(split_bins(bins, lengths.tolist(), needed), lengths.size)
    slots = needed // num_ranks
    if not reference.differencing:
        return split % num_ranks * slots + split // num_ranks, needed
    dealt = deal_bins(split, costs, num_ranks=num_ranks, num_bins=needed)
    return arrange_slots(dealt, costs, num_ranks=num_ranks, num_slots=slots), needed
