"""What no plan can beat: lower bounds on micro-batches and on slot time; algorithm layer, above
`arrays`.

Decides how few micro-batches to try, how heavy each slot has to be, and what `stats` call
unreachable. Invariant: a bound is never above the value of any plan that keeps the cap (tested
against brute force). Valid for every cost that depends on the length alone and is >= 0.

Notation: samples longest first, L_p length and c_p cost of the p-th (1-based), K micro-batches on D
ranks, m = K / D slots; B_1 >= B_2 >= ... the micro-batch costs of some plan in descending order.
"""

import math
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
    """Limits on the micro-batch costs of any plan with K micro-batches on D ranks; all int64, so exact everywhere."""

    ceiling: IntArray
    """[K], non-increasing: the i-th costliest micro-batch costs at most `ceiling[i]` (0-based)."""
    floor: IntArray
    """[m], non-increasing: the costliest micro-batch of slot k costs at least `floor[k]` when slots are sorted by cost."""
    knapsack: IntArray
    """[m]: the (k + 1) * D costliest micro-batches together cost at most `knapsack[k]`."""
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
    if not fitting.size:
        return oversized
    prefix = np.concatenate([[0], np.cumsum(fitting)])
    half = int(np.searchsorted(fitting, cap // 2, side="right"))
    small = fitting[:half]
    thresholds = np.concatenate([[1], small[np.flatnonzero(np.diff(small, prepend=0))]])
    first_alone = np.searchsorted(fitting, cap - thresholds, side="right")
    first_small = np.searchsorted(fitting, thresholds, side="left")
    room = cap * (first_alone - half) - (prefix[first_alone] - prefix[half])
    overflow = np.maximum(prefix[half] - prefix[first_small] - room, 0)
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
        lengths: int64 [n], longest first.
        costs: int64 [n], their costs.
        cap: tokens per micro-batch.
        num_ranks: D.
        num_slots: m.
    """
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
    densest_from = np.maximum.accumulate(density[::-1])[::-1]
    companions = np.minimum(lengths, cap - lengths)
    first = np.searchsorted(-lengths, -companions, side="left")
    rate = np.concatenate([densest_from, [0.0]])[first]
    company = np.ceil(np.minimum(np.maximum(cap - lengths, 0) * rate, float(costs.sum()))).astype(
        np.int64
    )
    heaviest_from = np.maximum.accumulate(np.concatenate([costs + company, [0]])[::-1])[::-1]
    ceiling: IntArray = heaviest_from[np.minimum(np.arange(num_bins), lengths.size)]
    return ceiling


def _floor(
    lengths: IntArray, costs: IntArray, cap: int, num_ranks: int, num_slots: int
) -> IntArray:
    floor = np.zeros(num_slots, dtype=np.int64)
    if not lengths.size:
        return floor
    count = np.arange(1, lengths.size + 1)
    needed = np.maximum.reduce(
        [
            -(-count // np.maximum(cap // lengths, 1)),
            np.cumsum(2 * lengths > cap),
            -(-np.cumsum(np.minimum(lengths, cap)) // cap),
        ]
    )
    least = np.minimum.accumulate(costs)
    first = np.searchsorted(np.maximum.accumulate(needed), np.arange(num_slots) * num_ranks + 1)
    reached = first < lengths.size
    floor[reached] = least[first[reached]]
    return floor


def _knapsack(
    fitted: IntArray, costs: IntArray, density: FloatArray, cap: int, num_ranks: int, num_slots: int
) -> IntArray:
    densest_first = np.argsort(-density, kind="stable")
    tokens = np.concatenate([[0], np.cumsum(fitted[densest_first])])
    worth = np.concatenate([[0], np.cumsum(costs[densest_first])])
    budget = np.arange(1, num_slots + 1) * (num_ranks * cap)
    whole = np.searchsorted(tokens, budget, side="right") - 1
    rate = np.concatenate([density[densest_first], [0.0]])[whole]
    rest: IntArray = np.ceil(np.minimum((budget - tokens[whole]) * rate, float(worth[-1]))).astype(
        np.int64
    )
    return worth[whole] + rest


def rank_bound(
    lengths: IntArray, costs: IntArray, cap: int, *, num_ranks: int, num_slots: int
) -> float:
    """Return a lower bound on the rank imbalance: costliest rank over the mean.

    Whichever rank runs sample i also runs what the other ranks have no room for: at least N - (D -
    1) * m * cap tokens, of which all but l_i cost at least the least cost per token. Example: one
    sample of cost 6 among a total of 8 on 2 ranks gives 1.5.

    Args:
        lengths: int64 [n], any order.
        costs: int64 [n].
        cap: tokens per micro-batch.
        num_ranks: D.
        num_slots: m.
    """
    total = int(costs.sum())
    if total == 0:
        return 1.0
    fitted = np.minimum(lengths, cap)
    inherited = int(fitted.sum()) - (num_ranks - 1) * num_slots * cap
    rate = float((costs / fitted).min())
    least = costs + np.floor(np.maximum(inherited - fitted, 0) * rate).astype(np.int64)
    return max(1.0, int(least.max()) * num_ranks / total)


def slot_bound(bounds: CostBounds, *, rank_limit: float | None = None) -> float:
    """Return a lower bound on the slot imbalance: sum over slots of the costliest micro-batch, over
    total / D.

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
    slots = bounds.floor.size
    capped = np.minimum(bounds.ceiling.reshape(slots, -1), bounds.floor[:, None]).sum(axis=1)
    held = np.minimum(np.cumsum(capped), bounds.knapsack)
    forced = np.cumsum(bounds.floor) * bounds.num_ranks + np.maximum(bounds.total - held, 0)
    best = max(1.0, int(forced.max()) / bounds.total)
    if rank_limit is None:
        return best
    return max(best, _idle_bound(bounds, rank_limit) * bounds.num_ranks / bounds.total)


def _idle_bound(bounds: CostBounds, rank_limit: float) -> int:
    """Largest slot sum S at which ranks within the limit and with the forced idle time cannot do all the work yet."""
    heaviest = math.ceil(rank_limit * bounds.total / bounds.num_ranks)
    idle = np.maximum(bounds.floor[0] - bounds.ceiling[: bounds.num_ranks], 0)
    low, high = 0, heaviest + int(idle.max())
    while high - low > 1:
        middle = (low + high) // 2
        done = int(np.minimum(np.maximum(middle - idle, 0), heaviest).sum())
        low, high = (low, middle) if done >= bounds.total else (middle, high)
    return low


def slot_targets(bounds: CostBounds) -> list[int]:
    """Return the cost each slot should reach, [m]: floor[k] or a common level T, whichever is
    higher.

    T is the least level at which micro-batches capped at max(floor[k], T) and at their ceiling hold
    the total.
    """
    return common_level(bounds.ceiling.reshape(bounds.floor.size, -1), bounds.floor, bounds.total)


def common_level(ceiling: IntArray, floor: IntArray, total: int) -> list[int]:
    """Return max(floor[k], T), [m], with the least T at which sum of min(ceiling[k, j],
    max(floor[k], T)) is the total.

    Args:
        ceiling: int64 [m, D], what each micro-batch can cost at most.
        floor: int64 [m], what its slot reaches anyway.
        total: cost to place; T is the total where the ceilings do not hold that much.
    """
    low, high = 0, total
    while high - low > 1:
        level = (low + high) // 2
        held = int(np.minimum(ceiling, np.maximum(floor, level)[:, None]).sum())
        low, high = (low, level) if held >= total else (level, high)
    targets: list[int] = np.maximum(floor, high).tolist()
    return targets


def head_starts(bounds: CostBounds, slack: float) -> list[int]:
    """Return by how much each rank should end below (1 + slack) times the mean, [D], for the rank
    of the r-th longest sample.

    With slot sum S the least that slack allows, rank j does at most S - idle_j: it starts that much
    ahead, so that a greedy pass ends where the bound says. All zero without slack.
    """
    if slack <= 0.0:
        return [0] * bounds.num_ranks
    heaviest = math.ceil((1.0 + slack) * bounds.total / bounds.num_ranks)
    idle = np.maximum(bounds.floor[0] - bounds.ceiling[: bounds.num_ranks], 0)
    starts: list[int] = np.maximum(idle - (_idle_bound(bounds, 1.0 + slack) - heaviest), 0).tolist()
    return starts


def useful_slack(bounds: CostBounds) -> float:
    """Return the least slack that brings the slot bound down to that of any ranks, in steps of 0.01
    %.

    At most `MOST_SLACK`; 0 where slack lowers nothing.
    """
    reachable = slot_bound(bounds)
    if slot_bound(bounds, rank_limit=1.0) <= reachable + _NO_GAIN:
        return 0.0
    low, high = 0, round(MOST_SLACK * 10_000)
    while high - low > 1:
        middle = (low + high) // 2
        enough = slot_bound(bounds, rank_limit=1.0 + middle / 10_000) <= reachable + _NO_GAIN
        low, high = (low, middle) if enough else (middle, high)
    return high / 10_000
