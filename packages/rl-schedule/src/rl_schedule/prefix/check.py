"""The promises of a plan with shared prefixes, checked against its request.

Everything is recomputed from the request's columns and the plan's arrays, sample by sample; none of
the planner's code takes part, so plans made by other code can be judged too.

Invariant: no promise is skipped because an earlier one is broken, unless what is left cannot be
read.

Axis letters: N samples, T trees, K micro-batches, M of one rank, S steps.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.errors import ScheduleError
from rl_schedule.invariants import Problem
from rl_schedule.prefix.plan import PrefixPlan, prefix_plan_digest
from rl_schedule.prefix.request import PrefixRequest, check_prefix_request

__all__ = ["check_prefix_plan"]

_JUST_BELOW = 1.0 - 1e-6
"""Sums of costs are taken in float64 here; ranks this close to the slowest count as slowest."""

_SHOWN = 8
"""Sample ids written into one message; `Problem.samples` has all."""


def check_prefix_plan(plan: PrefixPlan, request: PrefixRequest) -> list[Problem]:
    """List every promise that `plan` breaks for `request`; an empty list is a good plan.

    Promises with the number of a `SchedulePlan`'s mean the same here:

    - P1 equal counts of micro-batches, P2 multiples of the pipeline group, P3 every sample once or
      listed as dropped, P5 rollouts in one step, P8 the digest belongs to the arrays;
    - P6 the token cap, each prefix of a micro-batch counted once; one oversized sample alone;
    - P7 empty micro-batches are listed fillers, and stay empty only where every sample that could
      move there would make the slowest rank slower;
    - T1 a micro-batch has each prefix once, and every sample under its own; T2 lengths are those of
      the request.

    Args:
        plan: any plan.
        request: what was asked for, with the data.

    Returns:
        Problems in promise order, with the samples they concern.

    Raises:
        ScheduleError: `plan` or `request` is of another type.
    """
    given: object = plan
    if not isinstance(given, PrefixPlan):
        raise ScheduleError(
            f"plan must be a PrefixPlan, got {type(given).__name__}; pass what plan_with_prefixes"
            " returns, and a SchedulePlan to check_plan"
        )
    check_prefix_request(request)
    structure = list(_check_structure(plan, request))
    if structure:
        return structure
    rows = [list(range(first, last)) for first, last in pairwise(plan.micro_batch_offsets.tolist())]
    ends = plan.tree_sample_offsets.tolist()
    samples = plan.sample_positions.tolist()
    trees = [samples[first:last] for first, last in pairwise(ends)]
    return [
        *_check_alignment(plan, request),
        *_check_placement(plan, request),
        *_check_rollouts(plan, request, rows, trees),
        *_check_cap(plan, request, rows, trees),
        *_check_fillers(plan, request, rows, trees),
        *_check_digest(plan),
        *_check_trees(plan, request, rows, trees),
    ]


def _check_structure(plan: PrefixPlan, request: PrefixRequest) -> Iterator[Problem]:
    """P1, and whatever makes the arrays unreadable."""
    if plan.dp_size != request.schedule.dp_size:
        yield _problem(
            "P1",
            f"the plan is for {plan.dp_size} ranks, the request for {request.schedule.dp_size}",
        )
    num_trees, num_samples = plan.tree_prefix_ids.size, plan.sample_positions.size
    rows = plan.dp_size * sum(plan.num_microbatches)
    for name, offsets, count, last in (
        ("micro_batch_offsets", plan.micro_batch_offsets, rows, num_trees),
        ("tree_sample_offsets", plan.tree_sample_offsets, num_trees, num_samples),
    ):
        steps = np.diff(offsets)
        ends = (offsets[0], offsets[-1]) if offsets.size else None
        if offsets.size != count + 1 or ends != (0, last) or bool(np.any(steps < 0)):
            yield _problem(
                "P1", f"{name} must rise from 0 to {last} in {count + 1} entries, it has {offsets}"
            )
        elif name == "tree_sample_offsets" and bool(np.any(steps < 1)):
            yield _problem("T1", "a tree has no samples")
    for name, column, count in (
        ("tree_prefix_lengths", plan.tree_prefix_lengths, num_trees),
        ("response_lengths", plan.response_lengths, num_samples),
    ):
        if column.size != count:
            yield _problem("T2", f"{name} has {column.size} entries, not {count}")
    if len(plan.global_batch_sizes) != len(plan.num_microbatches):
        yield _problem("P1", "num_microbatches and global_batch_sizes differ in length")
    last = len(request.schedule.total_lengths) - 1
    outside = plan.sample_positions[(plan.sample_positions < 0) | (plan.sample_positions > last)]
    yield from _if_any("P3", f"positions outside 0..{last} are placed", outside.tolist())


def _check_alignment(plan: PrefixPlan, request: PrefixRequest) -> Iterator[Problem]:
    """P2: the count per rank is a positive multiple of the pipeline group."""
    group = request.schedule.alignment // request.schedule.dp_size
    for step, count in enumerate(plan.num_microbatches):
        if count < 1 or count % group:
            yield _problem(
                "P2",
                f"step {step} has {count} micro-batches per rank, not a positive multiple of"
                f" {group}",
                step=step,
            )


def _check_placement(plan: PrefixPlan, request: PrefixRequest) -> Iterator[Problem]:
    """P3: placed exactly once, or listed as dropped."""
    ids = np.asarray(request.schedule.rollout_ids).tolist()
    times = Counter(plan.sample_positions.tolist())
    listed, absent = set(plan.dropped_samples), set(range(len(ids))) - set(times)
    yield from _if_any(
        "P3", "samples are placed more than once", (i for i, count in times.items() if count > 1)
    )
    yield from _if_any("P3", "samples are neither placed nor listed as dropped", absent - listed)
    yield from _if_any(
        "P3", "samples are listed as dropped but are placed or do not exist", listed - absent
    )
    gone = set(ids) - {ids[i] for i in times}
    if gone != set(plan.dropped_rollouts):
        yield _problem(
            "P3",
            f"dropped_rollouts lists {len(plan.dropped_rollouts)} ids, {len(gone)} rollouts run"
            " nowhere",
        )


def _check_rollouts(
    plan: PrefixPlan, request: PrefixRequest, rows: list[list[int]], trees: list[list[int]]
) -> Iterator[Problem]:
    """P5: a rollout is in one step, whole or not at all; step sizes count rollouts."""
    ids = np.asarray(request.schedule.rollout_ids).tolist()
    step_of_column = [step for step, n in enumerate(plan.num_microbatches) for _ in range(n)]
    steps_of: dict[int, set[int]] = {}
    for row, own in enumerate(rows):
        step = step_of_column[row % len(step_of_column)]
        for tree in own:
            for sample in trees[tree]:
                steps_of.setdefault(ids[sample], set()).add(step)
    # -1 stands for the samples that run nowhere.
    for sample in plan.dropped_samples:
        if 0 <= sample < len(ids):
            steps_of.setdefault(ids[sample], set()).add(-1)
    torn = {rollout for rollout, steps in steps_of.items() if len(steps) > 1}
    yield from _if_any(
        "P5",
        f"rollouts {sorted(torn)[:_SHOWN]} span more than one step or run in part",
        (sample for sample, rollout in enumerate(ids) if rollout in torn),
    )
    for step, stated in enumerate(plan.global_batch_sizes):
        found = sum(step in steps for steps in steps_of.values())
        if stated != found:
            yield _problem(
                "P5", f"step {step} states {stated} rollouts and holds {found}", step=step
            )


def _check_cap(
    plan: PrefixPlan, request: PrefixRequest, rows: list[list[int]], trees: list[list[int]]
) -> Iterator[Problem]:
    """P6: tokens under the cap, or one oversized sample alone, which is listed."""
    totals = np.asarray(request.schedule.total_lengths).tolist()
    prefixes = np.asarray(request.prefix_lengths).tolist()
    for row, own in enumerate(rows):
        samples = [sample for tree in own for sample in trees[tree]]
        tokens = sum(prefixes[trees[tree][0]] for tree in own) + sum(
            totals[sample] - prefixes[sample] for sample in samples
        )
        if tokens > request.token_cap and len(samples) > 1:
            yield _in_row(
                "P6", f"holds {tokens} tokens, the cap is {request.token_cap}", plan, row, samples
            )
    oversized = {i for i, total in enumerate(totals) if total > request.token_cap}
    yield from _if_any(
        "P6",
        f"oversized_samples does not list exactly the samples above {request.token_cap} tokens;"
        " these differ",
        oversized ^ set(plan.oversized_samples),
    )
    if request.schedule.on_oversized == "drop":
        yield from _if_any(
            "P6",
            'oversized samples are placed although on_oversized is "drop"',
            oversized & set(plan.sample_positions.tolist()),
        )


def _check_fillers(
    plan: PrefixPlan, request: PrefixRequest, rows: list[list[int]], trees: list[list[int]]
) -> Iterator[Problem]:
    """P7: empty micro-batches are exactly the listed fillers, and nothing could fill them."""
    count = sum(plan.num_microbatches)
    empty = {divmod(row, count) for row, own in enumerate(rows) if not own}
    for rank, number in sorted(empty ^ set(plan.filler_micro_batches)):
        found = (
            "is empty and no listed filler"
            if (rank, number) in empty
            else "is listed as filler and is not empty"
        )
        yield _problem("P7", f"micro-batch {number} of rank {rank} {found}", rank=rank, at=number)
    response_costs, prefix_costs = _costs(request)
    first = 0
    for step, length in enumerate(plan.num_microbatches):
        columns = range(first, first + length)
        first += length
        # [D][M of the step]: the trees of each micro-batch.
        placed = [
            [[trees[tree] for tree in rows[rank * count + number]] for number in columns]
            for rank in range(plan.dp_size)
        ]
        for rank in _needless_fillers(placed, response_costs, prefix_costs):
            yield _problem(
                "P7",
                f"rank {rank} has a filler in step {step} that a sample could fill without making"
                " the slowest rank slower",
                step=step,
                rank=rank,
            )


def _costs(request: PrefixRequest) -> tuple[list[float], list[float]]:
    """Return what each sample's response and each sample's prefix cost, as levelled; [N] each."""
    prefixes, model = np.asarray(request.prefix_lengths), request.balance_model
    responses = model.responses(prefixes, request.response_lengths)
    return responses.tolist(), model.prefixes(prefixes).tolist()


def _needless_fillers(
    placed: list[list[list[list[int]]]], response_costs: list[float], prefix_costs: list[float]
) -> Iterator[int]:
    """Yield the ranks of one step with an empty micro-batch that something could move into."""
    loads = [
        sum(
            prefix_costs[tree[0]] + sum(response_costs[sample] for sample in tree)
            for micro_batch in own
            for tree in micro_batch
        )
        for own in placed
    ]
    # A sample that shares its micro-batch can leave it; it takes a copy of its prefix along.
    spare = [
        prefix_costs[sample] + response_costs[sample]
        for own in placed
        for micro_batch in own
        if sum(map(len, micro_batch)) > 1
        for tree in micro_batch
        for sample in tree
    ]
    room = max(loads, default=0.0) * _JUST_BELOW
    for rank, own in enumerate(placed):
        if [] not in own:
            continue
        # Inside the rank only a copy is added, and for a tree that leaves others nothing.
        added = [
            0.0 if len(micro_batch) > 1 else prefix_costs[tree[0]]
            for micro_batch in own
            for tree in micro_batch
            if len(micro_batch) > 1 or len(tree) > 1
        ]
        free = 0.0 in added
        if free or any(loads[rank] + cost < room for cost in (*added, *spare)):
            yield rank


def _check_digest(plan: PrefixPlan) -> Iterator[Problem]:
    """P8: the digest belongs to these arrays."""
    expected = prefix_plan_digest(plan.dp_size, plan.arrays())
    if plan.digest != expected:
        yield _problem("P8", f"the digest is {plan.digest}, the arrays give {expected}")


def _check_trees(
    plan: PrefixPlan, request: PrefixRequest, rows: list[list[int]], trees: list[list[int]]
) -> Iterator[Problem]:
    """T1 and T2: each prefix once per micro-batch, over its own samples; lengths as requested."""
    ids = np.asarray(request.prefix_ids).tolist()
    for row, own in enumerate(rows):
        stated = [int(plan.tree_prefix_ids[tree]) for tree in own]
        if len(set(stated)) < len(stated):
            twice = [prefix for prefix, count in Counter(stated).items() if count > 1]
            yield _in_row("T1", f"has prefixes {twice} more than once", plan, row, [])
    strangers = [
        sample
        for members, prefix in zip(trees, plan.tree_prefix_ids.tolist(), strict=True)
        for sample in members
        if ids[sample] != prefix
    ]
    yield from _if_any("T1", "samples stand under a prefix that is not theirs", strangers)
    lengths = np.asarray(request.prefix_lengths)
    sizes = np.diff(plan.tree_sample_offsets)
    placed: IntArray = plan.sample_positions
    wrong = np.repeat(plan.tree_prefix_lengths, sizes) != lengths[placed]
    yield from _if_any("T2", "prefix lengths differ from the request", placed[wrong].tolist())
    responses = np.asarray(request.schedule.total_lengths)[placed] - lengths[placed]
    wrong = plan.response_lengths != responses
    yield from _if_any("T2", "response lengths differ from the request", placed[wrong].tolist())


def _problem(
    promise: str,
    message: str,
    samples: tuple[int, ...] = (),
    *,
    rank: int | None = None,
    step: int | None = None,
    at: int | None = None,
) -> Problem:
    return Problem(
        promise=promise, message=message, samples=samples, rank=rank, step=step, micro_batch=at
    )


def _if_any(promise: str, message: str, samples: Iterable[int]) -> Iterator[Problem]:
    """Yield a problem that concerns samples, unless there are none of them."""
    ids = tuple(sorted(set(samples)))
    if ids:
        shown = ", ".join(str(i) for i in ids[:_SHOWN])
        yield _problem(
            promise, f"{message}: {shown}{', ...' if len(ids) > _SHOWN else ''}", samples=ids
        )


def _in_row(promise: str, message: str, plan: PrefixPlan, row: int, samples: list[int]) -> Problem:
    rank, number = divmod(row, sum(plan.num_microbatches))
    return _problem(
        promise,
        f"micro-batch {number} of rank {rank} {message}",
        samples=tuple(sorted(samples)),
        rank=rank,
        at=number,
    )
