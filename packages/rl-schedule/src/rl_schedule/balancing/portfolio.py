"""Balanced dynamic packing of one step: fewest micro-batches, level ranks, level slots.

The cheap method comes first, dearer ones only where it fails or leaves ranks apart.

Invariants: the cap holds; no more micro-batches than first-fit-decreasing needs, rounded up to the
alignment; no micro-batch is empty when there are enough samples; P10.

Axis letters: N samples, D ranks, M slots, K = D * M bins.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing.bounds import (
    MOST_SLACK,
    CostBounds,
    micro_batch_bound,
    slot_bound,
    useful_slack,
)
from rl_schedule.balancing.exact import MOST_SAMPLES, search_exactly
from rl_schedule.balancing.greedy import pack_by_cost, pack_squares_first
from rl_schedule.balancing.pack_long_first import pack_long_first
from rl_schedule.balancing.problem import Assignment, Candidate, PlainPackings, StepProblem
from rl_schedule.balancing.rank_assignment import arrange_slots, deal_bins, deal_in_turn
from rl_schedule.balancing.swap_between_ranks import level_ranks
from rl_schedule.packing import align_bins, decreasing_order, round_up

__all__ = ["balance_step"]

_LEVEL_RANKS = 1.001
"""Ranks this close to the mean need no repair; P10 cannot fail there either."""

_TIGHT_FILL = 0.97
"""Above this fill the cap decides who gets the last samples, whatever their cost."""

_SHORT_SHARES = (0.2, 0.1, 0.05, 0.0)
"""Shares of the tokens that a squares-first pass places by cost: the fuller, the smaller."""

_LONG_SHARES = (6, 16)
"""Samples above cap / 6 (then cap / 16) are fitted to one another if the greedy pass fails."""

_RETARGET_SHARE, _RETARGET_MOST = 3, 2_000
"""Samples above cap / 3 come before the targets are set anew; larger steps gain nothing by it."""

_CLOSE_SLOTS = 0.004
"""Distance of the slots from their bound that is not worth another greedy pass."""

_LPT_MAY_FIT = 0.9
"""Fill above which a greedy pass cannot succeed if no sample is short enough for the room left."""

_MANY_SAMPLES = 50_000
"""Above this one greedy pass has to do: with `auto`, with the slack that the bound suggests."""

_SLOT_GAP = 0.02
"""Distance of the slots from their bound at which another method is tried as well."""


def balance_step(
    lengths: IntArray,
    costs: IntArray,
    *,
    cap: int,
    num_ranks: int,
    alignment: int,
    rank_slack: float | str,
) -> Assignment:
    """Assign the samples of one step.

    Args:
        lengths: int64 [N], padded tokens, N >= 1.
        costs: int64 [N].
        cap: tokens per micro-batch.
        num_ranks: ranks.
        alignment: the micro-batch count is a multiple of this.
        rank_slack: how far a rank may end above the mean to save slot time, or `"auto"`.
    """
    order = decreasing_order(lengths)
    best, num_slots = _pack(lengths[order], costs[order], cap, num_ranks, alignment, rank_slack)
    bin_of = np.empty_like(best.bin_of)
    bin_of[order] = best.bin_of
    bin_of = arrange_slots(bin_of, costs, num_ranks=num_ranks, num_slots=num_slots)
    return Assignment(bin_of=bin_of, num_slots=num_slots, path=best.path, rank_slack=best.slack)


def _pack(
    lengths: IntArray, costs: IntArray, cap: int, num_ranks: int, alignment: int, slack: float | str
) -> tuple[Candidate, int]:
    """Return the best candidate with the fewest micro-batches found, and their number per rank."""
    least = round_up(micro_batch_bound(lengths, cap), alignment)
    problem = StepProblem(
        lengths=lengths,
        costs=costs,
        cap=cap,
        num_ranks=num_ranks,
        num_slots=least // num_ranks,
        packings=PlainPackings(lengths, cap),
    )
    found = list(_candidates(problem, slack))
    if not found:
        # No method packs as few as the bound says. First-fit-decreasing always packs its own count.
        bins = problem.packings.first_fit
        count = round_up(int(bins.max()) + 1, alignment)
        problem = replace(problem, num_slots=count // num_ranks)
        if count > least:
            found = list(_candidates(problem, slack))
        if not found:
            split = align_bins(bins, lengths, count)
            dealt = deal_bins(split, costs, num_ranks=num_ranks, num_bins=count)
            found = [problem.candidate(dealt, "first_fit_decreasing|kk")]
    best = _best(found, slack)
    return best if slack == "auto" else _level(problem, best, float(slack)), problem.num_slots


def _best(candidates: list[Candidate], slack: float | str) -> Candidate:
    """Return the first best: by slots if `auto`, else by ranks beyond what is level, then slots."""
    if slack == "auto":
        return min(candidates, key=lambda candidate: candidate.slot)
    level = _LEVEL_RANKS + float(slack)
    return min(candidates, key=lambda candidate: (max(candidate.rank, level), candidate.slot))


def _candidates(problem: StepProblem, slack: float | str) -> Iterator[Candidate]:
    """Yield plans with `problem.num_slots` micro-batches per rank; none if no method finds one."""
    bounds = problem.bounds()
    greedy = _greedy(problem, bounds, slack)
    yield from greedy
    lowest = slot_bound(bounds, rank_limit=1.0)
    if greedy and min(candidate.slot for candidate in greedy) <= lowest + _SLOT_GAP:
        return
    # The first count that works; fitting all samples to one another is the last resort.
    counts = [problem.num_longer(problem.cap // share) for share in _LONG_SHARES]
    if not greedy:
        counts.append(problem.lengths.size)
    for num_long in dict.fromkeys(count for count in counts if count):
        bins = pack_long_first(problem, num_long=num_long)
        if bins is not None:
            yield problem.candidate(bins, f"composites({num_long})")
            return


def _greedy(problem: StepProblem, bounds: CostBounds, slack: float | str) -> list[Candidate]:
    """Return what greedy passes find: one per slack, and the best again with targets set anew."""
    found: list[Candidate] = []
    # Even the shortest sample takes a sixth of a bin, and the bins are nearly full.
    if 6 * int(problem.lengths[-1]) > problem.cap and problem.fill > _LPT_MAY_FIT:
        return found
    for share in _slacks(problem, bounds) if slack == "auto" else [float(slack)]:
        bins = pack_by_cost(problem, bounds, slack=share)
        if bins is None:
            return found
        found.append(problem.candidate(bins, "lpt", slack=share))
    best = _best(found, slack)
    if (
        problem.lengths.size <= _RETARGET_MOST
        and best.slot > slot_bound(bounds, rank_limit=best.rank) + _CLOSE_SLOTS
    ):
        num_long = problem.num_longer(problem.cap // _RETARGET_SHARE)
        bins = pack_by_cost(problem, bounds, slack=best.slack, retarget_after=num_long)
        if bins is not None:
            found.append(problem.candidate(bins, "lpt(retarget)", slack=best.slack))
    return found


def _slacks(problem: StepProblem, bounds: CostBounds) -> list[float]:
    """Return the slacks that `auto` tries: none, what the bound can use, and around it if cheap."""
    useful = useful_slack(bounds)
    if not useful:
        return [0.0]
    if problem.lengths.size > _MANY_SAMPLES:
        return [useful]
    return [0.0, useful / 2, useful, min(4 * useful, MOST_SLACK)]


def _level(problem: StepProblem, best: Candidate, slack: float) -> Candidate:
    """Level the ranks of a candidate that needs it, by dearer and dearer methods, and keep P10."""
    for repair in (_by_squares, _by_exchange, _by_search, _by_strides):
        if best.rank <= _LEVEL_RANKS + slack:
            break
        best = _best([best, *repair(problem, best)], slack)
    return best


def _by_squares(problem: StepProblem, best: Candidate) -> Iterator[Candidate]:
    if problem.fill <= _TIGHT_FILL:
        return
    for share in _SHORT_SHARES:
        bins = pack_squares_first(problem, short_share=share)
        if bins is None:
            continue
        best = problem.candidate(bins, f"lpt(squares, {share:g})")
        yield best
        if best.rank <= _LEVEL_RANKS:
            return


def _by_exchange(problem: StepProblem, best: Candidate) -> Iterator[Candidate]:
    bins = level_ranks(
        best.bin_of,
        problem.lengths,
        problem.costs,
        cap=problem.cap,
        num_ranks=problem.num_ranks,
        num_slots=problem.num_slots,
    )
    yield problem.candidate(bins, f"{best.path}|exchange")


def _by_search(problem: StepProblem, best: Candidate) -> Iterator[Candidate]:
    if problem.lengths.size <= MOST_SAMPLES:
        bins = search_exactly(problem, best.bin_of)
        if bins is not None:
            yield problem.candidate(bins, f"{best.path}|search")


def _by_strides(problem: StepProblem, best: Candidate) -> Iterator[Candidate]:
    """Yield first-fit-decreasing bins dealt in turn, P10's reference, if they are few enough."""
    del best
    bins = problem.packings.first_fit
    if int(bins.max()) < problem.num_bins:
        split = align_bins(bins, problem.lengths, problem.num_bins)
        dealt = deal_in_turn(split, num_ranks=problem.num_ranks, num_slots=problem.num_slots)
        yield problem.candidate(dealt, "first_fit_decreasing|strided")
