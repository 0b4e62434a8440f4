"""Whole-step greedy passes over two-level LPT; algorithm layer, above `two_level` and `bounds`.

Decides with which costs, targets and head starts a pass runs. Invariants are those of
`two_level_lpt`: the cap holds, and None says that the pass got stuck, never that no plan exists.
"""

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.problem import StepProblem
from rl_schedule.balancing.two_level import LptState, two_level_lpt
from rl_schedule.bounds import CostBounds, common_level, cost_bounds, head_starts, slot_targets
from rl_schedule.dealing import bin_sums

__all__ = ["costs_when_full", "pack_by_cost", "pack_long_first", "pack_squares_first", "top_up"]


def pack_by_cost(
    problem: StepProblem, bounds: CostBounds, *, slack: float = 0.0
) -> IntArray | None:
    """Place all samples by cost, longest first; int64 [n] rank-major bins, or None.

    `slack` gives ranks that will idle next to an unsplittable long sample a head start, so that
    they end lower.
    """
    state = LptState.empty(
        num_ranks=problem.num_ranks,
        num_slots=problem.num_slots,
        cap=problem.cap,
        targets=slot_targets(bounds),
        head_start=head_starts(bounds, slack),
    )
    return _placed(
        two_level_lpt(problem.lengths.tolist(), problem.costs.tolist(), state, problem.cap)
    )


def pack_long_first(
    problem: StepProblem, bounds: CostBounds, *, num_long: int, slack: float = 0.0
) -> IntArray | None:
    """Place the `num_long` longest samples by cost, set the targets anew by what they left, then
    place the rest.

    Worth a try where long samples had to share micro-batches that no bound foresaw: the other ranks
    may then fill the same slot as high.
    """
    starts = head_starts(bounds, slack)
    state = LptState.empty(
        num_ranks=problem.num_ranks,
        num_slots=problem.num_slots,
        cap=problem.cap,
        targets=slot_targets(bounds),
        head_start=starts,
    )
    placed = _placed(
        two_level_lpt(
            problem.lengths[:num_long].tolist(),
            problem.costs[:num_long].tolist(),
            state,
            problem.cap,
        )
    )
    return None if placed is None else top_up(problem, placed, head_start=starts)


def pack_squares_first(problem: StepProblem, *, short_share: float) -> IntArray | None:
    """Place long samples by their cost above the least cost per token, then short ones by cost;
    int64 [n], or None.

    None also when the cost is linear in tokens: there is nothing above it to balance.

    In nearly full micro-batches every rank ends with about as many tokens whatever is done, so what
    is linear in tokens levels itself and only the rest is worth balancing; the short samples,
    almost without squares, then level the costs.

    Args:
        problem: the step.
        short_share: share of all tokens, in the shortest samples, that is placed by cost.
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
    state = LptState.empty(
        num_ranks=problem.num_ranks,
        num_slots=problem.num_slots,
        cap=problem.cap,
        targets=slot_targets(bounds),
    )
    placed = _placed(
        two_level_lpt(
            problem.lengths[:num_long].tolist(), excess[:num_long].tolist(), state, problem.cap
        )
    )
    return None if placed is None else top_up(problem, placed)


def top_up(
    problem: StepProblem, placed: IntArray, *, head_start: list[int] | None = None
) -> IntArray | None:
    """Place the samples after the first `placed.size` by cost onto given bins; int64 [n] rank-major
    bins, or None.

    A rank's k-th costliest bin aims at what the k-th costliest of some rank costs already, or at
    the common level that the rest gives all bins with room.

    Args:
        problem: the step, samples longest first.
        placed: int64 [p], rank-major bins of the p longest samples.
        head_start: [D], by how much each rank should end below the others.
    """
    count = placed.size
    if count == problem.lengths.size:
        return placed
    shape = (problem.num_ranks, problem.num_slots)
    sums = bin_sums(problem.costs[:count], placed, problem.num_bins).reshape(shape)
    by_cost = np.argsort(-sums, axis=1, kind="stable")
    full = np.take_along_axis(costs_when_full(problem, placed).reshape(shape), by_cost, axis=1)
    highest = np.take_along_axis(sums, by_cost, axis=1).max(axis=0)
    targets = np.asarray(common_level(full.T, highest, int(problem.costs.sum())))
    gap = np.empty_like(sums)
    np.put_along_axis(gap, by_cost, np.take_along_axis(sums, by_cost, axis=1) - targets, axis=1)
    loads = sums.sum(axis=1) + np.asarray(
        head_start if head_start is not None else [0] * problem.num_ranks
    )
    state = LptState(
        num_ranks=problem.num_ranks,
        num_slots=problem.num_slots,
        load=loads.tolist(),
        gap=gap.ravel().tolist(),
        room=(problem.cap - bin_sums(problem.lengths[:count], placed, problem.num_bins)).tolist(),
    )
    rest = _placed(
        two_level_lpt(
            problem.lengths[count:].tolist(), problem.costs[count:].tolist(), state, problem.cap
        )
    )
    return None if rest is None else np.concatenate([placed, rest])


def costs_when_full(problem: StepProblem, placed: IntArray) -> IntArray:
    """Return what each bin costs when the samples after the first `placed.size` use up its room:
    int64 [bins].

    They do so at their mean cost per token.
    """
    count = placed.size
    sums = bin_sums(problem.costs[:count], placed, problem.num_bins)
    if count == problem.lengths.size:
        return sums
    rooms = problem.cap - bin_sums(problem.lengths[:count], placed, problem.num_bins)
    rate = int(problem.costs[count:].sum()) / int(problem.lengths[count:].sum())
    full: IntArray = sums + np.floor(np.maximum(rooms, 0) * rate).astype(np.int64)
    return full


def _placed(chosen: list[int] | None) -> IntArray | None:
    return None if chosen is None else np.asarray(chosen, dtype=np.int64)
