"""Balanced dynamic packing of one step: few micro-batches, level ranks, level slots.

The cheap method comes first, dearer ones only where it fails or leaves ranks apart.

Invariants: the cap holds; no more micro-batches than first-fit-decreasing needs, rounded up to the
alignment, and one per rank where that is allowed; none is empty when there are enough samples; P10.

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

_LEVEL_ENOUGH = 1.0015
"""Ranks further apart may cost one more micro-batch each."""

_SHORT_SHARE = 0.1
"""Share of the tokens, in the shortest samples, that a squares-first pass places by cost."""

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
    may_grow: bool = False,
) -> Assignment:
    """Assign the samples of one step.

    Args:
        lengths: int64 [N], padded tokens, N >= 1.
        costs: int64 [N].
        cap: tokens per micro-batch.
        num_ranks: ranks.
        alignment: the micro-batch count is a multiple of this.
        rank_slack: how far a rank may end above the mean to save slot time, or `"auto"`.
        may_grow: each rank may run one micro-batch more than needed where that levels the ranks.
    """
    order = decreasing_order(lengths)
    problem, found = _fewest(lengths[order], costs[order], cap, num_ranks, alignment, rank_slack)
    best = _best(found, rank_slack)
    if rank_slack != "auto":
        # One micro-batch more per rank is a multiple of the alignment only without pipeline groups.
        may_grow = may_grow and alignment == num_ranks
        problem, best = _level_or_grow(problem, best, float(rank_slack), may_grow=may_grow)
    bin_of = np.empty_like(best.bin_of)
    bin_of[order] = best.bin_of
    slots = problem.num_slots
    bin_of = arrange_slots(bin_of, costs, num_ranks=num_ranks, num_slots=slots)
    return Assignment(bin_of=bin_of, num_slots=slots, path=best.path, rank_slack=best.slack)


def _fewest(
    lengths: IntArray, costs: IntArray, cap: int, num_ranks: int, alignment: int, slack: float | str
) -> tuple[StepProblem, list[Candidate]]:
    """Return the step with the fewest micro-batches that a method packs, and what was found."""
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
    if found:
        return problem, found
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
    return problem, found


def _level_or_grow(
    problem: StepProblem, best: Candidate, slack: float, *, may_grow: bool
) -> tuple[StepProblem, Candidate]:
    """Level the ranks; where they stay apart, with one micro-batch more if that is allowed."""
    enough = _LEVEL_ENOUGH + slack
    roomier = replace(problem, num_slots=problem.num_slots + 1)
    # More micro-batches than samples would leave some without work.
    may_grow = may_grow and best.rank > enough and roomier.num_bins <= problem.lengths.size
    bound = problem.rank_bound()
    grown = None
    if may_grow and bound > enough:
        # Nothing levels these ranks with as few, so the repairs can wait.
        grown = _packed_and_levelled(roomier, slack)
        if grown is not None and grown.rank <= enough:
            return roomier, grown
    best = _level(problem, best, slack, bound)
    if may_grow and best.rank > enough:
        grown = grown or _packed_and_levelled(roomier, slack)
        if grown is not None and _is_worth_a_micro_batch(grown.rank, best.rank, enough):
            return roomier, grown
    return problem, best


def _packed_and_levelled(problem: StepProblem, slack: float) -> Candidate | None:
    """Return the best candidate with its ranks levelled, or None if no method finds one."""
    found = list(_candidates(problem, slack))
    return _level(problem, _best(found, slack), slack, problem.rank_bound()) if found else None


def _is_worth_a_micro_batch(grown: float, best: float, enough: float) -> bool:
    """Tell whether it levels the ranks, or takes away half of what the costliest is above them."""
    return grown <= enough or 2.0 * (grown - 1.0) <= best - 1.0


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


def _level(problem: StepProblem, start: Candidate, slack: float, bound: float) -> Candidate:
    """Level the ranks of a candidate that needs it, by dearer and dearer methods, and keep P10."""
    best, level = start, max(_LEVEL_RANKS, bound) + slack
    for repair in (_by_squares, _by_exchange, _by_search, _by_strides):
        if best.rank <= level:
            break
        # Ranks that nothing levels gain no more from a second start.
        if repair is _by_exchange and best is not start and bound > _LEVEL_ENOUGH:
            continue
        given = start if repair is _by_exchange else best
        best = _best([best, *repair(problem, given)], slack)
    return best


def _by_squares(problem: StepProblem, best: Candidate) -> Iterator[Candidate]:
    """Yield a squares-first pass and, unless it is level, the same with samples exchanged."""
    del best
    bins = pack_squares_first(problem, short_share=_SHORT_SHARE)
    if bins is None:
        return
    found = problem.candidate(bins, "lpt(squares)")
    yield found
    if found.rank > _LEVEL_RANKS:
        yield from _by_exchange(problem, found)


def _by_exchange(problem: StepProblem, best: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with samples of its ranks exchanged."""
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
    """Yield an optimal plan of a step so small that all can be tried, if it is better."""
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
