"""Bins in their two forms, and how a packing becomes as many bins as the ranks need.

An array `bin_of` is what the algorithms add up and index with; a list of lists is what splits and
exchanges change. Every rank runs the same number of micro-batches, so what a packing lacks is
gained by splitting its fullest bins.

Invariants: a split never makes a bin larger, so the cap survives; fewer than the wanted number
result only when every bin holds a single sample.

Axis letters in this package: N samples, K bins, D data-parallel ranks, M slots (micro-batches of
one rank), so that K = D * M. Bins of ranks are numbered rank by rank ("rank-major"): bin
`r * M + k` is micro-batch k of rank r.
"""

import heapq
from itertools import chain, pairwise

import numpy as np

from rl_schedule.arrays import IntArray

__all__ = ["align_bins", "bin_sums", "group_bins", "number_bins", "round_up", "split_bins"]


def bin_sums(values: IntArray, bin_of: IntArray, num_bins: int) -> IntArray:
    """Sum `values` [N] per bin: int64 [K], exact."""
    sums = np.zeros(num_bins, dtype=np.int64)
    # Not bincount(weights=...), which adds up in float64 and is inexact above 2**53.
    np.add.at(sums, bin_of, values)
    return sums


def group_bins(bin_of: IntArray, num_bins: int = 0) -> list[list[int]]:
    """List the samples of each bin, ascending; `num_bins` counts empty bins at the end too."""
    order = np.argsort(bin_of, kind="stable").tolist()
    ends = np.cumsum(np.bincount(bin_of, minlength=num_bins)).tolist()
    return [order[start:end] for start, end in pairwise([0, *ends])]


def number_bins(bins: list[list[int]], num_samples: int) -> IntArray:
    """Return the bin of each sample, int64 [N], from the samples of each bin."""
    bin_of = np.empty(num_samples, dtype=np.int64)
    members = np.fromiter(chain.from_iterable(bins), dtype=np.int64, count=num_samples)
    bin_of[members] = np.repeat(np.arange(len(bins)), [len(one) for one in bins])
    return bin_of


def round_up(count: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is >= `count` and >= `multiple`.

    Example: 5 and 0 rounded up to multiples of 4 give 8 and 4.
    """
    return max(multiple, -(-count // multiple) * multiple)


def align_bins(bin_of: IntArray, lengths: IntArray, target: int) -> IntArray:
    """Split bins as `split_bins` does, on arrays: the bin of each sample, int64 [N]."""
    return number_bins(split_bins(group_bins(bin_of), lengths.tolist(), target), bin_of.size)


def split_bins(bins: list[list[int]], lengths: list[int], target: int) -> list[list[int]]:
    """Split the fullest bins in two until there are `target` of them or only single samples remain.

    The bin with most tokens among those with at least two samples (the first of equals) deals its
    samples, longest first, to the lighter of two halves; the first half keeps its place and the
    second one is appended. O((n + t) log n).

    Args:
        bins: positions of each bin.
        lengths: tokens of each position.
        target: bins wanted; fewer result when there are fewer samples, never more.

    Returns:
        The bins, positions ascending inside those that were split. The argument is not changed.
    """
    result = [list(members) for members in bins]
    # Negative tokens, because heapq pops the smallest; then the number: ties go to the first.
    heap = [
        (-sum(lengths[i] for i in members), number)
        for number, members in enumerate(result)
        if len(members) > 1
    ]
    heapq.heapify(heap)
    while len(result) < target and heap:
        _, number = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = ([], [])
        tokens = [0, 0]
        for position in sorted(result[number], key=lambda i: (-lengths[i], i)):
            lighter = 0 if tokens[0] <= tokens[1] else 1
            halves[lighter].append(position)
            tokens[lighter] += lengths[position]
        result[number] = sorted(halves[0])
        result.append(sorted(halves[1]))
        for half, place, weight in zip(halves, (number, len(result) - 1), tokens, strict=True):
            if len(half) > 1:
                heapq.heappush(heap, (-weight, place))
    return result
