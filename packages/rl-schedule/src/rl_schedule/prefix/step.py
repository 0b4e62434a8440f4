"""One optimizer step with shared prefixes: cut groups, pack and deal fragments, level ranks.

Whole groups first: every cut processes a prefix once more. Finer cuts are tried where ranks stay
apart, and single samples where sharing might be no better than none.

Invariants: the cap holds; never more micro-batches and never a costlier rank than balanced packing
of whole samples; a micro-batch stays empty only where filling it would slow the slowest rank.

Axis letters: N samples of the step, T trees, D ranks, M slots, K = D * M bins.
"""

from dataclasses import dataclass

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.balancing import Assignment, balance_step
from rl_schedule.balancing.bounds import micro_batch_bound
from rl_schedule.balancing.rank_assignment import arrange_slots
from rl_schedule.packing import round_up
from rl_schedule.prefix.filling import fill_empty_bins
from rl_schedule.prefix.forest import Forest
from rl_schedule.prefix.fragments import Fragments, SharedStep, cut_groups
from rl_schedule.prefix.slots import even_out_slots

__all__ = ["PlannedTrees", "plan_trees"]

_GOOD_ENOUGH = 1.01
"""Costliest rank over what no plan can beat, from which on no finer cut is tried."""

_LEVEL = 1.003
"""Costliest rank over the mean, from which on ranks count as level."""

_CUTS = (1.0, 0.5, 2.0, 0.25)
"""A fragment costs at most this times the mean rank; tried in this order."""

_MANY_SAMPLES = 1_500
"""Above this only the first two cuts are tried: larger steps gain nothing by the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrees:
    """The trees of one step and where each of them runs."""

    fragments: Fragments
    """T trees: a prefix and the samples of the step that share it there, ascending."""
    bin_of: IntArray
    """int64 [T]: bin `r * num_slots + k` is micro-batch k of rank r."""
    num_slots: int
    """Micro-batches per rank, M."""
    path: str
    """How the groups were cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One way to place all samples, after levelling."""

    forest: Forest
    path: str

    @property
    def rank_cost(self) -> int:
        return max(self.forest.loads)

    @property
    def rank_imbalance(self) -> float:
        loads = self.forest.loads
        return max(loads) * len(loads) / (sum(loads) or 1)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """What counts: the costliest rank, then fillers, micro-batches and tokens."""
        forest = self.forest
        return self.rank_cost, forest.trees.count({}), forest.num_slots, sum(forest.tokens)


def plan_trees(step: SharedStep) -> PlannedTrees:
    """Place the samples of one step; the cheapest costliest rank wins.

    Sharing is left out only where it costs the slowest rank something or needs more micro-batches.
    """
    if step.prefix_tokens.size == step.costs.size:
        return _finished(step, _with_single_samples(step, []))
    limit = step.least_rank_cost() * _GOOD_ENOUGH
    candidates: list[_Candidate] = []
    for share in _CUTS[: 2 if step.costs.size > _MANY_SAMPLES else None]:
        # A finer cut adds copies; where ranks are level already it can gain nothing.
        if share < 1.0 and candidates[0].rank_imbalance <= _LEVEL:
            continue
        fragments = cut_groups(step, most_cost=int(step.least_rank_cost() * share))
        placed = _balance(step, fragments.tokens(step), fragments.costs(step))
        candidates.append(_grow(step, fragments, placed, f"shared({share:g})"))
        if candidates[-1].rank_cost <= limit:
            break
    best = min(candidates, key=lambda candidate: candidate.order)
    if not _surely_no_worse(step, best):
        best = _with_single_samples(step, candidates)
    return _finished(step, best)


def _balance(step: SharedStep, lengths: IntArray, costs: IntArray) -> Assignment:
    return balance_step(
        lengths,
        costs,
        cap=step.cap,
        num_ranks=step.num_ranks,
        alignment=step.alignment,
        rank_slack=0.0,
    )


def _grow(step: SharedStep, fragments: Fragments, placed: Assignment, path: str) -> _Candidate:
    """Let fragments of one prefix in one micro-batch grow together, and level the ranks."""
    forest = Forest(step, fragments, placed.bin_of, placed.num_slots)
    if not step.may_leave_empty:
        fill_empty_bins(forest, most=None)
    forest.level()
    if forest.merge_trees(may_empty=step.may_leave_empty):
        forest.level()
    fill_empty_bins(forest, most=max(forest.loads))
    even_out_slots(forest)
    return _Candidate(forest=forest, path=path)


def _surely_no_worse(step: SharedStep, best: _Candidate) -> bool:
    """Tell whether packing whole samples cannot win: by what no such packing can beat."""
    least = round_up(micro_batch_bound(step.totals, step.cap), step.alignment)
    return (
        best.rank_cost * step.num_ranks <= int(step.total_costs.sum())
        and best.forest.num_slots * step.num_ranks <= least
    )


def _with_single_samples(step: SharedStep, candidates: list[_Candidate]) -> _Candidate:
    """Return the best candidate that needs no more micro-batches than whole samples do."""
    single = Fragments(
        prefixes=step.prefix_of.tolist(), members=[[i] for i in range(step.costs.size)]
    )
    placed = _balance(step, step.totals, step.total_costs)
    unshared = _grow(step, single, placed, "unshared")
    few = [one for one in candidates if one.forest.num_slots <= placed.num_slots]
    return min([*few, unshared], key=lambda candidate: candidate.order)


def _finished(step: SharedStep, best: _Candidate) -> PlannedTrees:
    """List the trees of the best candidate, slots arranged by cost alike on all ranks."""
    forest = best.forest
    placed = [
        (number, prefix, sorted(members))
        for number, trees in enumerate(forest.trees)
        for prefix, members in trees.items()
    ]
    trees = Fragments(
        prefixes=[prefix for _, prefix, _ in placed], members=[members for _, _, members in placed]
    )
    bin_of = np.asarray([number for number, _, _ in placed], dtype=np.int64)
    arranged = arrange_slots(
        bin_of, trees.costs(step), num_ranks=step.num_ranks, num_slots=forest.num_slots
    )
    return PlannedTrees(
        fragments=trees, bin_of=arranged, num_slots=forest.num_slots, path=best.path
    )
