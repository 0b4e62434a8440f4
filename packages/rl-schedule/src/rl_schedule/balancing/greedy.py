"""Whole-step greedy passes over two-level LPT; algorithm layer, above ``two_level`` and ``bounds``.

Decides with which costs, targets and head starts a pass runs. Invariants are those of ``two_level_lpt``: the cap holds, and
None says that the pass got stuck, never that no plan exists.
"""

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.problem import StepProblem
from rl_schedule.balancing.two_level import LptState, two_level_lpt
from rl_schedule.bounds import CostBounds, cost_bounds, head_starts, slot_targets
from rl_schedule.dealing import bin_sums

__all__ = ["pack_by_cost", "pack_squares_first", "top_up"]


def pack_by_cost(problem: StepProblem, bounds: CostBounds, *, slack: float = 0.0) -> IntArray | None:
    """Place all samples by cost, longest first; int64 [n] rank-major bins, or None.

    ``slack`` gives ranks that will idle next to an unsplittable long sample a head start, so that they end lower.
    """
    state = LptState.empty(
        num_ranks=problem.num_ranks,
        num_slots=problem.num_slots,
        cap=problem.cap,
        targets=slot_targets(bounds),
        head_start=head_starts(bounds, slack),
    )
    return _placed(two_level_lpt(problem.lengths.tolist(), problem.costs.tolist(), state, problem.cap))


def pack_squares_first(problem: StepProblem, *, short_share: float) -> IntArray | None:
    """Place long samples by their cost above the least cost per token, then short ones by cost; int64 [n], or None.

    None also when the cost is linear in tokens: there is nothing above it to balance.


    In nearly full micro-batches every rank ends with about as many tokens whatever is done, so what is linear in tokens
    levels itself and only the rest is worth balancing; the short samples, almost without squares, then level the costs.

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
    bounds = cost_bounds(problem.lengths, excess, problem.cap, num_ranks=problem.num_ranks, num_slots=problem.num_slots)
    state = LptState.empty(num_ranks=problem.num_ranks, num_slots=problem.num_slots, cap=problem.cap, targets=slot_targets(bounds))
    placed = _placed(two_level_lpt(problem.lengths[:num_long].tolist(), excess[:num_long].tolist(), state, problem.cap))
    return None if placed is None else top_up(problem, placed, slot_targets(problem.bounds()))


def top_up(problem: StepProblem, placed: IntArray, targets: list[int]) -> IntArray | None:
    """Place the samples after the first ``placed.size`` by cost onto given bins; int64 [n] rank-major bins, or None.

    Args:
        problem: the step, samples longest first.
        placed: int64 [p], rank-major bins of the p longest samples.
        targets: [m] cost each slot should reach, highest first; a rank's k-th costliest bin so far aims at the k-th.
    """
    count = placed.size
    if count == problem.lengths.size:
        return placed
    sums = bin_sums(problem.costs[:count], placed, problem.num_bins).reshape(problem.num_ranks, -1)
    place = np.argsort(np.argsort(-sums, axis=1, kind="stable"), axis=1)
    state = LptState(
        num_ranks=problem.num_ranks,
        num_slots=problem.num_slots,
        load=sums.sum(axis=1).tolist(),
        gap=(sums - np.asarray(targets)[place]).ravel().tolist(),
        room=(problem.cap - bin_sums(problem.lengths[:count], placed, problem.num_bins)).tolist(),
    )
    rest = _placed(two_level_lpt(problem.lengths[count:].tolist(), problem.costs[count:].tolist(), state, problem.cap))
    return None if rest is None else np.concatenate([placed, rest])


def _placed(chosen: list[int] | None) -> IntArray | None:
    return None if chosen is None else np.asarray(chosen, dtype=np.int64)
