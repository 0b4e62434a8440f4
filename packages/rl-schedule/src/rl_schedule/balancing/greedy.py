"""Greedy passes over a whole step: with which costs, targets and head starts `two_level_lpt` runs.

Invariants are those of `two_level_lpt`: the cap holds, and None says that the pass got stuck, never
that no plan exists.

Axis letters: N samples (longest first), D ranks, M slots, K = D * M bins.
"""

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.bounds import (
    CostBounds,
    common_level,
    cost_bounds,
    head_starts,
    slot_targets,
)
from rl_schedule.balancing.problem import StepProblem
from rl_schedule.balancing.two_level import LptState, two_level_lpt
from rl_schedule.packing import bin_sums

__all__ = ["fill_levels", "pack_by_cost", "pack_squares_first", "run_lpt", "top_up"]


def run_lpt(lengths: IntArray, costs: IntArray, state: LptState, cap: int) -> IntArray | None:
    """Run `two_level_lpt` on arrays; it works on lists because its loop is plain Python."""
    chosen = two_level_lpt(lengths.tolist(), costs.tolist(), state, cap)
    return None if chosen is None else np.asarray(chosen, dtype=np.int64)


def pack_by_cost(
    problem: StepProblem,
    bounds: CostBounds,
    *,
    slack: float = 0.0,
    retarget_after: int | None = None,
) -> IntArray | None:
    """Place all samples by cost, longest first.

    Args:
        problem: the step.
        bounds: its bounds, which give the targets of the slots.
        slack: gives ranks that will idle next to an unsplittable long sample a head start, so that
            they end lower.
        retarget_after: after this many samples the targets are set anew by what those left. Worth a
            try where long samples had to share micro-batches that no bound foresaw: the other ranks
            may then fill the same slot as high.

    Returns:
        Rank-major bins, int64 [N], or None.
    """
    count = problem.lengths.size if retarget_after is None else retarget_after
    starts = head_starts(bounds, slack)
    placed = _place_longest(problem, problem.costs, count, bounds, starts)
    return None if placed is None else top_up(problem, placed, head_start=starts)


def pack_squares_first(problem: StepProblem, *, short_share: float) -> IntArray | None:
    """Place long samples by their cost above the least cost per token, then short ones by cost.

    In nearly full micro-batches every rank ends with about as many tokens whatever is done, so what
    is linear in tokens levels itself and only the rest is worth balancing; the short samples,
    almost without squares, then level the costs.

    Args:
        problem: the step.
        short_share: share of all tokens, in the shortest samples, that is placed by cost.

    Returns:
        Rank-major bins, int64 [N], or None; None also when the cost is linear in tokens, as there
        is nothing above it to balance.
    """
    rate = float((problem.costs / problem.lengths).min())
    excess = problem.costs - np.floor(problem.lengths * rate).astype(np.int64)
    if not excess.any():
        return None
    tokens = np.cumsum(problem.lengths)
    num_long = int(np.searchsorted(tokens, (1.0 - short_share) * int(tokens[-1])))
    bounds = cost_bounds(
        problem.lengths,
        excess,
        problem.cap,
        num_ranks=problem.num_ranks,
        num_slots=problem.num_slots,
    )
    placed = _place_longest(problem, excess, num_long, bounds)
    return None if placed is None else top_up(problem, placed)


def _place_longest(
    problem: StepProblem,
    costs: IntArray,
    count: int,
    bounds: CostBounds,
    head_start: list[int] | None = None,
) -> IntArray | None:
    """Place the `count` longest samples into empty bins, int64 [count], or None."""
    state = LptState.empty(
        num_ranks=problem.num_ranks,
        num_slots=problem.num_slots,
        cap=problem.cap,
        targets=slot_targets(bounds),
        head_start=head_start,
    )
    return run_lpt(problem.lengths[:count], costs[:count], state, problem.cap)


def top_up(
    problem: StepProblem, placed: IntArray, *, head_start: list[int] | None = None
) -> IntArray | None:
    """Place the samples after the first `placed.size` by cost onto given bins.

    A rank's k-th costliest bin aims at what the k-th costliest of some rank costs already, or at
    the common level that the rest gives all bins with room.

    Args:
        problem: the step, samples longest first.
        placed: int64 [p], rank-major bins of the p longest samples.
        head_start: [D], by how much each rank should end below the others.

    Returns:
        Rank-major bins, int64 [N], or None.
    """
    count = placed.size
    if count == problem.lengths.size:
        return placed
    cost_K, room_K, full_K = fill_levels(problem, placed)
    cost_DM = cost_K.reshape(problem.num_ranks, problem.num_slots)
    # Column k of the sorted tables is the k-th costliest bin of each rank, which may be any bin.
    by_cost_DM = np.argsort(-cost_DM, axis=1, kind="stable")
    sorted_DM = np.take_along_axis(cost_DM, by_cost_DM, axis=1)
    full_MD = np.take_along_axis(full_K.reshape(cost_DM.shape), by_cost_DM, axis=1).T
    target_M = np.asarray(
        common_level(full_MD, sorted_DM.max(axis=0), int(problem.costs.sum())), dtype=np.int64
    )
    # Back from the k-th costliest to the bin it is.
    gap_DM = np.empty_like(cost_DM)
    np.put_along_axis(gap_DM, by_cost_DM, sorted_DM - target_M, axis=1)
    load_D = cost_DM.sum(axis=1) + np.asarray(head_start or [0] * problem.num_ranks)
    state = LptState(
        num_ranks=problem.num_ranks,
        num_slots=problem.num_slots,
        load=load_D.tolist(),
        gap=gap_DM.ravel().tolist(),
        room=room_K.tolist(),
    )
    rest = run_lpt(problem.lengths[count:], problem.costs[count:], state, problem.cap)
    return None if rest is None else np.concatenate([placed, rest])


def fill_levels(problem: StepProblem, placed: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return what each bin costs, its room in tokens, and what it costs when full; int64 [K] each.

    It is full when the samples after the first `placed.size`, at their mean cost per token, have
    used up its room.
    """
    count = placed.size
    cost_K = bin_sums(problem.costs[:count], placed, problem.num_bins)
    room_K = problem.cap - bin_sums(problem.lengths[:count], placed, problem.num_bins)
    rate = int(problem.costs[count:].sum()) / max(1, int(problem.lengths[count:].sum()))
    return cost_K, room_K, cost_K + np.floor(np.maximum(room_K, 0) * rate).astype(np.int64)
