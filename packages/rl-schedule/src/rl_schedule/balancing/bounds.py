"""What no plan can beat: lower bounds on micro-batches, ranks and slots.

They say how few micro-batches to try, how heavy each slot has to be, and what nobody can reach.

Invariant: a bound is never above the value of any plan that keeps the cap (tested against brute
force). Valid for every cost that depends on the length alone and is >= 0.

Notation: samples longest first, L_p length and c_p cost of the p-th (1-based), K micro-batches on D
ranks, M = K / D slots; B_1 >= B_2 >= ... the micro-batch costs of some plan in descending order.
Array names end in their axes: N samples, K, D, M.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rl_schedule.arrays import FloatArray, IntArray

__all__ = [
    "MOST_SLACK",
    "CostBounds",
    "common_level",
    "cost_bounds",
    "head_starts",
    "micro_batch_bound",
    "rank_bound",
    "slot_bound",
    "slot_targets",
    "useful_slack",
]


MOST_SLACK = 0.05
"""`auto` never lets a rank end more than 5 % above the mean."""

_NO_GAIN = 0.0005
"""Differences of slot imbalance not worth any slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBounds:
    """Limits on the micro-batch costs of any plan for K micro-batches on D ranks; int64: exact."""

    ceiling: IntArray
    """[K], non-increasing: the i-th costliest micro-batch costs at most `ceiling[i]` (0-based)."""
    floor: IntArray
    """[M], non-increasing: of slots sorted by cost, slot k has one of at least `floor[k]`."""
    knapsack: IntArray
    """[M]: the (k + 1) * D costliest micro-batches together cost at most `knapsack[k]`."""
    total: int
    """Cost of all samples."""
    num_ranks: int
    """D."""


def micro_batch_bound(lengths: IntArray, cap: int) -> int:
    """Return a lower bound on the bins of size `cap` that hold `lengths`; 0 for no samples.

    Martello and Toth's L2 (Discrete Applied Mathematics 28, 1990): for a threshold t <= cap / 2,
    samples longer than cap - t are alone, those above cap / 2 are pairwise apart, and what the room
    of the latter cannot take of the samples >= t needs further bins; the best t counts. t = 1 gives
    ceil(tokens / cap). An oversized sample is one bin.

    Example: 7, 7, 7 under cap 8 need 3, although ceil(21 / 8) is 3; 5, 5, 5 under 8 need 3,
    although ceil(15 / 8) is 2.
    """
    oversized = int(np.count_nonzero(lengths > cap))
    fitting = np.sort(lengths[lengths <= cap])
    tokens = np.concatenate([[0], np.cumsum(fitting)])
    half = int(np.searchsorted(fitting, cap // 2, side="right"))
    # Only the lengths that occur (and 1) matter as thresholds; all of them at once from here on.
    thresholds = np.unique(np.concatenate([[1], fitting[:half]]))
    # In ascending order: from `first_small` on >= t, from `half` on > cap / 2, from `first_alone`
    # on > cap - t. The middle group, between the last two, has room for small samples.
    first_alone = np.searchsorted(fitting, cap - thresholds, side="right")
    first_small = np.searchsorted(fitting, thresholds, side="left")
    room = cap * (first_alone - half) - (tokens[first_alone] - tokens[half])
    overflow = np.maximum(tokens[half] - tokens[first_small] - room, 0)
    return oversized + int(np.max(fitting.size - half + -(-overflow // cap)))


def cost_bounds(
    lengths: IntArray, costs: IntArray, cap: int, *, num_ranks: int, num_slots: int
) -> CostBounds:
    """Bound the micro-batch costs of every plan that keeps the cap.

    - ceiling: a micro-batch whose longest sample is l costs at most A(l) = c(l) + (cap - l) * r, r
      the largest cost per token among lengths <= min(l, cap - l). Among the i costliest one has a
      longest sample no longer than L_i, so B_i <= max over j >= i of A(L_j).
    - floor: the p longest need nb(p) = max(ceil(p / floor(cap / L_p)), how many are > cap / 2,
      ceil(their tokens / cap)) micro-batches, so B_nb(p) >= the least cost among them. Slot k is at
      least B_(k * D + 1).
    - knapsack: the costliest (k + 1) * D * cap tokens, taken fractionally, plus what oversized
      samples have beyond.

    Args:
        lengths: int64 [N], longest first.
        costs: int64 [N], their costs.
        cap: tokens per micro-batch.
        num_ranks: D.
        num_slots: M.
    """
    # An oversized sample fills its micro-batch and no more.
    fitted = np.minimum(lengths, cap)
    density = costs / np.maximum(fitted, 1)
    return CostBounds(
        ceiling=_ceiling(lengths, costs, density, cap, num_ranks * num_slots),
        floor=_floor(lengths, costs, cap, num_ranks, num_slots),
        knapsack=_knapsack(fitted, costs, density, cap, num_ranks, num_slots),
        total=int(costs.sum()),
        num_ranks=num_ranks,
    )


def _ceiling(
    lengths: IntArray, costs: IntArray, density: FloatArray, cap: int, num_bins: int
) -> IntArray:
    # Running maxima from the end: the densest among the samples p, p + 1, ..., which are no longer.
    densest_from_N = np.maximum.accumulate(density[::-1])[::-1]
    companion_N = np.minimum(lengths, cap - lengths)
    # Negated, because searchsorted needs ascending values: the first sample short enough to join.
    first_N = np.searchsorted(-lengths, -companion_N, side="left")
    rate_N = np.concatenate([densest_from_N, [0.0]])[first_N]
    # Bounded by the total before the cast, which a user's steep cost could overflow.
    company_N = np.minimum(np.maximum(cap - lengths, 0) * rate_N, float(costs.sum()))
    heaviest = np.concatenate([costs + np.ceil(company_N).astype(np.int64), [0]])
    heaviest_from = np.maximum.accumulate(heaviest[::-1])[::-1]
    ceiling_K: IntArray = heaviest_from[np.minimum(np.arange(num_bins), lengths.size)]
    return ceiling_K


def _floor(
    lengths: IntArray, costs: IntArray, cap: int, num_ranks: int, num_slots: int
) -> IntArray:
    floor_M = np.zeros(num_slots, dtype=np.int64)
    count = np.arange(1, lengths.size + 1)
    needed_N = np.maximum.reduce(
        [
            -(-count // np.maximum(cap // lengths, 1)),
            np.cumsum(2 * lengths > cap),
            -(-np.cumsum(np.minimum(lengths, cap)) // cap),
        ]
    )
    cheapest_so_far_N = np.minimum.accumulate(costs)
    # The fewest samples that need k * D + 1 micro-batches; the bound itself need not rise with p.
    first_M = np.searchsorted(np.maximum.accumulate(needed_N), np.arange(num_slots) * num_ranks + 1)
    reached_M = first_M < lengths.size
    floor_M[reached_M] = cheapest_so_far_N[first_M[reached_M]]
    return floor_M


def _knapsack(
    fitted: IntArray, costs: IntArray, density: FloatArray, cap: int, num_ranks: int, num_slots: int
) -> IntArray:
    densest_first = np.argsort(-density, kind="stable")
    tokens = np.concatenate([[0], np.cumsum(fitted[densest_first])])
    worth: IntArray = np.concatenate([[0], np.cumsum(costs[densest_first])])
    budget_M = np.arange(1, num_slots + 1) * (num_ranks * cap)
    # Samples that fit whole, then as much of the next one as there is budget left.
    whole_M = np.searchsorted(tokens, budget_M, side="right") - 1
    rate_M = np.concatenate([density[densest_first], [0.0]])[whole_M]
    part_M = np.minimum((budget_M - tokens[whole_M]) * rate_M, float(worth[-1]))
    held_M: IntArray = worth[whole_M] + np.ceil(part_M).astype(np.int64)
    return held_M


def rank_bound(
    lengths: IntArray, costs: IntArray, cap: int, *, num_ranks: int, num_slots: int
) -> float:
    """Return a lower bound on the rank imbalance: costliest rank over the mean.

    Any q samples are on at most q ranks, and these also run what the other D - q have no room for:
    at least all tokens less (D - q) * M * cap, of which those beside the q samples cost at least
    what the cheapest tokens of the step do. The costliest of the q ranks has a q-th of that or
    more; the best q counts, for the samples that cost most above the least cost per token.

    Example: one sample of cost 6 among a total of 8 on 2 ranks gives 1.5.

    Args:
        lengths: int64 [N], any order.
        costs: int64 [N].
        cap: tokens per micro-batch.
        num_ranks: D.
        num_slots: M.
    """
    total = int(costs.sum())
    if total == 0:
        return 1.0
    fitted = np.minimum(lengths, cap)
    density = costs / fitted
    most = min(num_ranks, lengths.size)
    held = np.argsort(np.floor(fitted * density.min()) - costs, kind="stable")[:most]
    cheapest = np.argsort(density, kind="stable")
    # One more entry than samples: what no samples hold.
    tokens = np.concatenate([[0], np.cumsum(fitted[cheapest])])
    worth = np.concatenate([[0], np.cumsum(costs[cheapest])])
    count_Q = np.arange(1, most + 1)
    elsewhere_Q = (num_ranks - count_Q) * (num_slots * cap)
    inherited_Q = np.maximum(int(tokens[-1]) - elsewhere_Q - np.cumsum(fitted[held]), 0)
    # Samples that are taken whole, then as much of the next one as is needed.
    whole_Q = np.minimum(np.searchsorted(tokens, inherited_Q, side="right"), lengths.size) - 1
    part_Q = np.floor((inherited_Q - tokens[whole_Q]) * density[cheapest[whole_Q]])
    least_Q = np.cumsum(costs[held]) + worth[whole_Q] + part_Q.astype(np.int64)
    alone = int(costs.max()) * num_ranks / total
    return max(1.0, alone, float((least_Q / count_Q).max()) * num_ranks / total)


def slot_bound(bounds: CostBounds, *, rank_limit: float | None = None) -> float:
    """Return a lower bound on the slot imbalance: sum of the slots' costliest, over total / D.

    For any ranks: max over k of sum(floor[:k]) + (total - the most the k * D costliest can hold
    when slot j is capped at floor[j]) / D. With `rank_limit` = the costliest rank over the mean,
    also: the slot with the costliest sample c_1 has micro-batches <= ceiling[j], so rank j idles
    there at least c_1 - ceiling[j]; the least S with sum_j min(rank_limit * mean, S - (c_1 -
    ceiling[j])+) >= total.

    Returns:
        At least 1.0; 1.0 for no work.
    """
    if bounds.total == 0 or not bounds.floor.size:
        return 1.0
    # [M, D]: the k-th D costliest micro-batches are the most that slot k can hold.
    ceiling_MD = bounds.ceiling.reshape(bounds.floor.size, -1)
    capped_M = np.minimum(ceiling_MD, bounds.floor[:, None]).sum(axis=1)
    held_M = np.minimum(np.cumsum(capped_M), bounds.knapsack)
    forced_M = np.cumsum(bounds.floor) * bounds.num_ranks + np.maximum(bounds.total - held_M, 0)
    best = max(1.0, int(forced_M.max()) / bounds.total)
    if rank_limit is None:
        return best
    return max(best, _idle_bound(bounds, rank_limit) * bounds.num_ranks / bounds.total)


def _idle_bound(bounds: CostBounds, rank_limit: float) -> int:
    """Return the largest slot sum at which the ranks cannot do all the work yet.

    Each is kept within the limit and idles as long as it is forced to.
    """
    heaviest = math.ceil(rank_limit * bounds.total / bounds.num_ranks)
    idle_D = _forced_idle(bounds)

    def all_done(slot_sum: int) -> bool:
        work_D = np.minimum(np.maximum(slot_sum - idle_D, 0), heaviest)
        return int(work_D.sum()) >= bounds.total

    return max(0, _least(heaviest + int(idle_D.max()), all_done) - 1)


def _forced_idle(bounds: CostBounds) -> IntArray:
    """Return how long each rank idles at least in the slot of the costliest sample, int64 [D]."""
    idle_D: IntArray = np.maximum(bounds.floor[0] - bounds.ceiling[: bounds.num_ranks], 0)
    return idle_D


def _least(highest: int, enough: Callable[[int], bool]) -> int:
    """Return the least integer from 1 on that is enough; `highest` counts as enough unasked."""
    # bisect asks its key only halfway points: a binary search over numbers, not over a list.
    return min(highest, 1 + bisect_left(range(1, highest), True, key=enough))


def slot_targets(bounds: CostBounds) -> list[int]:
    """Return the cost each slot should reach, [M]: floor[k] or a common level T if that is higher.

    T is the least level at which micro-batches capped at max(floor[k], T) and at their ceiling hold
    the total.
    """
    return common_level(bounds.ceiling.reshape(bounds.floor.size, -1), bounds.floor, bounds.total)


def common_level(ceiling: IntArray, floor: IntArray, total: int) -> list[int]:
    """Return max(floor[k], T), [M], for the least common level T at which all the cost has a place.

    That is, the least T with sum over k, j of min(ceiling[k, j], max(floor[k], T)) >= total.

    Args:
        ceiling: int64 [M, D], what each micro-batch can cost at most.
        floor: int64 [M], what its slot reaches anyway.
        total: cost to place; T is the total where the ceilings do not hold that much.
    """

    def holds_all(level: int) -> bool:
        held_MD = np.minimum(ceiling, np.maximum(floor, level)[:, None])
        return int(held_MD.sum()) >= total

    targets: list[int] = np.maximum(floor, _least(total, holds_all)).tolist()
    return targets


def head_starts(bounds: CostBounds, slack: float) -> list[int]:
    """Return by how much each rank should end below (1 + slack) times the mean, [D].

    Rank r stands for that of the r-th longest sample. With slot sum S the least that slack allows,
    rank j does at most S - idle_j: it starts that much ahead, so that a greedy pass ends where the
    bound says. All zero without slack.
    """
    if slack <= 0.0:
        return [0] * bounds.num_ranks
    heaviest = math.ceil((1.0 + slack) * bounds.total / bounds.num_ranks)
    spare = _idle_bound(bounds, 1.0 + slack) - heaviest
    starts: list[int] = np.maximum(_forced_idle(bounds) - spare, 0).tolist()
    return starts


def useful_slack(bounds: CostBounds) -> float:
    """Return the least slack that brings the slot bound down to that of any ranks.

    In steps of 0.01 %, at most `MOST_SLACK`; 0 where slack lowers nothing.
    """
    reachable = slot_bound(bounds)
    if slot_bound(bounds, rank_limit=1.0) <= reachable + _NO_GAIN:
        return 0.0

    def reaches(steps: int) -> bool:
        return slot_bound(bounds, rank_limit=1.0 + steps / 10_000) <= reachable + _NO_GAIN

    return _least(round(MOST_SLACK * 10_000), reaches) / 10_000
