"""The promises of a plan, P1 to P13, checked against its request.

Everything is recomputed from the request and nothing is trusted that the plan says about itself, so
plans made by other code can be judged too.

Invariant: no promise is skipped because an earlier one is broken, unless what is left cannot be
read.

Axis letters: N samples, P of them placed, K micro-batches, M of one rank, S steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.cost import integer_costs
from rl_schedule.document import layout_problems
from rl_schedule.limited_step import limits_of, padded_costs, strided_bins
from rl_schedule.packing import Units, bin_sums, first_fit_decreasing, number_bins, split_bins
from rl_schedule.plan import SchedulePlan, plan_digest
from rl_schedule.request import ScheduleRequest
from rl_schedule.steps import group_rollouts

__all__ = ["Problem", "check_plan"]

_TOLERANCE = 1.001
"""P10 allows 0.1 % over the strided reference."""

_SHOWN = 8
"""Sample ids written into one message; `Problem.samples` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One broken promise."""

    promise: str
    """`P1` to `P13`."""
    message: str
    """What was found, what was promised, and where."""
    samples: tuple[int, ...] = ()
    """Rollout positions concerned, ascending."""
    rank: int | None = None
    """Data-parallel rank concerned, if it is one."""
    step: int | None = None
    """Step concerned, if it is one."""
    micro_batch: int | None = None
    """Micro-batch of that rank, flat over steps, if it is one."""

    def __str__(self) -> str:
        """Return `promise: message`."""
        return f"{self.promise}: {self.message}"


def check_plan(plan: SchedulePlan, request: ScheduleRequest) -> list[Problem]:
    """List every promise that `plan` breaks for `request`; an empty list is a good plan.

    Args:
        plan: any plan, also one from a document.
        request: what was asked for, with the data.

    Returns:
        Problems in promise order, with the sample ids they concern. P8 is checked as "the digest
        belongs to the arrays"; that equal requests give equal digests is a property of
        `build_dp_schedule`.
    """
    structure = list(_check_structure(plan, request))
    if structure:
        return structure
    return [
        *_check_alignment(plan, request),
        *_check_placement(plan, request),
        *_check_local_indices(plan),
        *_check_rollouts(plan, request),
        *_check_cap(plan, request),
        *_check_fillers(plan),
        *_check_digest(plan),
        *_check_balance(plan, request),
        *_check_limits(plan, request),
    ]


def _check_structure(plan: SchedulePlan, request: ScheduleRequest) -> Iterator[Problem]:
    """P1, and whatever makes the arrays unreadable."""
    if plan.dp_size != request.dp_size:
        yield Problem(
            promise="P1",
            message=f"the plan is for {plan.dp_size} ranks, the request for {request.dp_size}",
        )
    for promise, message in layout_problems(plan.dp_size, plan.arrays()):
        yield Problem(promise=promise, message=message)
    placed, last = plan.sample_positions, len(request.total_lengths) - 1
    outside = placed[(placed < 0) | (placed > last)]
    yield from _if_any("P3", f"positions outside 0..{last} are placed", outside)


def _check_alignment(plan: SchedulePlan, request: ScheduleRequest) -> Iterator[Problem]:
    """P2: the count per rank is a positive multiple of the pipeline group."""
    group = request.alignment // request.dp_size
    for step, count in enumerate(plan.num_microbatches):
        if count < 1 or count % group:
            yield Problem(
                promise="P2",
                message=(
                    f"step {step} has {count} micro-batches per rank, not a positive multiple of"
                    f" {group}"
                ),
                step=step,
            )


def _check_placement(plan: SchedulePlan, request: ScheduleRequest) -> Iterator[Problem]:
    """P3: placed exactly once, or listed as dropped."""
    ids = np.asarray(request.rollout_ids)
    times_N = np.bincount(plan.sample_positions, minlength=ids.size)
    unplaced = np.flatnonzero(times_N == 0)
    listed = np.asarray(plan.dropped_samples, dtype=np.int64)
    for message, samples in (
        ("samples are placed more than once", np.flatnonzero(times_N > 1)),
        ("samples are neither placed nor listed as dropped", np.setdiff1d(unplaced, listed)),
        (
            "samples are listed as dropped but are placed or do not exist",
            np.setdiff1d(listed, unplaced),
        ),
    ):
        yield from _if_any("P3", message, samples)
    gone = set(np.setdiff1d(ids, ids[times_N > 0]).tolist())
    if gone != set(plan.dropped_rollouts):
        yield Problem(
            promise="P3",
            message=(
                f"dropped_rollouts lists {len(plan.dropped_rollouts)} ids, {len(gone)}"
                " rollouts run nowhere"
            ),
        )


def _check_local_indices(plan: SchedulePlan) -> Iterator[Problem]:
    """P4: flattened local indices count up from 0."""
    for rank in range(plan.dp_size):
        view = plan.rank_view(rank)
        flat = np.concatenate([np.empty(0, dtype=np.int64), *view.micro_batch_indices])
        if not np.array_equal(flat, np.arange(view.partition.size)):
            yield Problem(
                promise="P4",
                message=f"the local indices of rank {rank} are not 0..{view.partition.size - 1}",
                rank=rank,
            )


def _check_rollouts(plan: SchedulePlan, request: ScheduleRequest) -> Iterator[Problem]:
    """P5: a rollout is in one step, whole or not at all; step sizes count rollouts."""
    rollouts = group_rollouts(np.asarray(request.rollout_ids))
    number_N = np.empty_like(rollouts.positions)
    number_N[rollouts.positions] = np.repeat(np.arange(len(rollouts)), np.diff(rollouts.offsets))
    step_N = np.full_like(number_N, -1)
    step_N[plan.sample_positions] = plan.placed_steps
    # The step of a rollout's first sample stands for the rollout.
    step_R = step_N[rollouts.positions[rollouts.offsets[:-1]]]
    torn = np.flatnonzero(step_N != step_R[number_N])
    ids = sorted({int(rollouts.ids[number_N[i]]) for i in torn})
    yield from _if_any("P5", f"rollouts {ids[:_SHOWN]} span more than one step", torn)
    counts = np.bincount(step_R[step_R >= 0], minlength=len(plan.global_batch_sizes))
    for number, (stated, found) in enumerate(
        zip(plan.global_batch_sizes, counts.tolist(), strict=False)
    ):
        if stated != found:
            yield Problem(
                promise="P5",
                message=f"step {number} states {stated} rollouts and holds {found}",
                step=number,
            )


def _check_cap(plan: SchedulePlan, request: ScheduleRequest) -> Iterator[Problem]:
    """P6 and P9: padded tokens under the cap, or one oversized sample alone, which is listed.

    A sample and those it is kept together with count as one.
    """
    cap, rows = request.token_cap, plan.placed_rows
    size_K = np.diff(plan.micro_batch_offsets)
    tokens = request.padded_lengths[plan.sample_positions]
    amount_K = size_K if cap is None else bin_sums(tokens, rows, size_K.size)
    if request.pad_to_longest:
        longest_K = np.zeros_like(size_K)
        np.maximum.at(longest_K, rows, tokens)
        amount_K = longest_K * size_K
    most = cap or request.micro_batch_size or 0
    limit = f"samples, micro_batch_size is {most}" if cap is None else f"tokens, the cap is {most}"
    units_K = size_K
    if request.keep_together is not None:
        # Distinct pairs of a micro-batch and a unit: how many units each micro-batch holds.
        unit_of = request.units().of[plan.sample_positions]
        pairs = np.unique(np.stack([rows, unit_of]), axis=1)
        units_K = np.bincount(pairs[0], minlength=size_K.size)
    promise = "P9" if cap is not None and request.pad_to_multiple > 1 else "P6"
    for row in np.flatnonzero((amount_K > most) & (units_K > 1)).tolist():
        yield _in_row(promise, f"holds {int(amount_K[row])} {limit}", plan, row)
    oversized = request.oversized_samples
    if oversized.tolist() != list(plan.oversized_samples):
        differing = np.setxor1d(oversized, np.asarray(plan.oversized_samples, dtype=np.int64))
        yield _about(
            "P6",
            f"oversized_samples does not list exactly the samples above {cap} tokens; these differ",
            differing,
        )
    if request.on_oversized == "drop":
        placed = np.intersect1d(oversized, plan.sample_positions)
        yield from _if_any(
            "P6", 'oversized samples are placed although on_oversized is "drop"', placed
        )


def _check_fillers(plan: SchedulePlan) -> Iterator[Problem]:
    """P7: empty micro-batches are exactly the listed fillers."""
    empty = {
        divmod(row, plan.micro_batches_per_rank)
        for row in np.flatnonzero(np.diff(plan.micro_batch_offsets) == 0).tolist()
    }
    for rank, number in sorted(empty ^ set(plan.filler_micro_batches)):
        found = (
            "is empty and no listed filler"
            if (rank, number) in empty
            else "is listed as filler and is not empty"
        )
        yield Problem(
            promise="P7",
            message=f"micro-batch {number} of rank {rank} {found}",
            rank=rank,
            micro_batch=number,
        )


def _check_digest(plan: SchedulePlan) -> Iterator[Problem]:
    """P8: the digest belongs to these arrays."""
    expected = plan_digest(plan.dp_size, plan.arrays())
    if plan.digest != expected:
        yield Problem(
            promise="P8", message=f"the digest is {plan.digest}, the arrays give {expected}"
        )


def _check_balance(plan: SchedulePlan, request: ScheduleRequest) -> Iterator[Problem]:
    """P10: a balanced plan is no worse than as many first-fit-decreasing bins dealt in turn."""
    cap, slots = request.token_cap, plan.micro_batches_per_rank
    if cap is None or request.balance == "none" or request.rank_slack != 0.0 or not slots:
        return
    if request.equal_samples:  # Bins dealt in turn give ranks unequal numbers of samples.
        return
    rows, steps, ranks = plan.placed_rows, plan.placed_steps, request.dp_size
    # Rollout by rollout, as plans see the batch: ties go to the first.
    place_N = np.argsort(group_rollouts(np.asarray(request.rollout_ids)).positions)
    for step, count in enumerate(plan.num_microbatches):
        members, own_rows = plan.sample_positions[steps == step], rows[steps == step]
        if not members.size:
            continue
        weights = request.levelled_costs_of(members)
        costs = integer_costs(weights, terms=members.size + request.alignment)
        spent = padded_costs(own_rows, costs) if request.pad_to_longest else costs
        ours = int(bin_sums(spent, own_rows // slots, ranks).max())
        # So close to the mean that no reference can be better by more than the tolerance.
        if not request.pad_to_longest and ours * ranks <= _TOLERANCE * int(costs.sum()):
            continue
        order = np.argsort(place_N[members], kind="stable")
        reference = (_limited_reference if request.has_limits else _plain_reference)(
            request, members[order], costs[order], count * ranks
        )
        if reference is not None and ours > _TOLERANCE * reference:
            yield Problem(
                promise="P10",
                message=(
                    f"the costliest rank of step {step} is {ours / reference:.4f} times that of"
                    " strided first-fit-decreasing bins"
                ),
                step=step,
            )


def _plain_reference(
    request: ScheduleRequest, members: IntArray, costs: IntArray, num_bins: int
) -> int | None:
    return strided_reference(
        request.padded_lengths[members],
        costs,
        cap=request.token_cap or 0,
        num_ranks=request.dp_size,
        num_bins=num_bins,
    )


def _limited_reference(
    request: ScheduleRequest, members: IntArray, costs: IntArray, num_bins: int
) -> int | None:
    """Return the costliest rank's cost of strided bins that keep the limits of the request."""
    kept = None if request.keep_together is None else np.asarray(request.keep_together)[members]
    units = Units.of_samples(request.padded_lengths[members], kept)
    bins = strided_bins(units, limits_of(request), num_ranks=request.dp_size, num_bins=num_bins)
    if bins is None:
        return None
    bin_of = bins[units.of]
    spent = padded_costs(bin_of, costs) if request.pad_to_longest else costs
    slots = num_bins // request.dp_size
    return int(bin_sums(spent, bin_of // slots, request.dp_size).max())


def strided_reference(
    lengths: IntArray, costs: IntArray, *, cap: int, num_ranks: int, num_bins: int
) -> int | None:
    """Return the costliest rank's cost if first-fit-decreasing bins are dealt to ranks in turn.

    They are split up to `num_bins` first.

    Returns:
        None when first-fit-decreasing needs more bins than that: there is no such plan to compare
        with.
    """
    bins = first_fit_decreasing(lengths, cap)
    if len(bins) > num_bins:
        return None
    split = number_bins(split_bins(bins, lengths.tolist(), num_bins), lengths.size)
    return int(bin_sums(costs, split % num_ranks, num_ranks).max())


def _check_limits(plan: SchedulePlan, request: ScheduleRequest) -> Iterator[Problem]:
    """P11 to P13: samples per micro-batch, samples kept together, samples per rank."""
    rows, placed, slots = plan.placed_rows, plan.sample_positions, plan.micro_batches_per_rank
    most = request.max_samples_per_micro_batch
    if most is not None:
        size_K = np.diff(plan.micro_batch_offsets)
        for row in np.flatnonzero(size_K > most).tolist():
            what = f"holds {int(size_K[row])} samples, max_samples_per_micro_batch is {most}"
            yield _in_row("P11", what, plan, row)
    if request.keep_together is not None:
        units = request.units()
        row_N = np.full(units.of.size, -1, dtype=np.int64)
        row_N[placed] = rows
        torn = np.flatnonzero(row_N != row_N[units.first][units.of])
        whole = np.flatnonzero(np.isin(units.of, units.of[torn]))
        yield from _if_any("P12", "samples to keep together are not in one micro-batch", whole)
    if request.equal_samples and slots:
        count_SD = np.zeros((len(plan.num_microbatches), plan.dp_size), dtype=np.int64)
        np.add.at(count_SD, (plan.placed_steps, rows // slots), 1)
        for step, counts in enumerate(count_SD.tolist()):
            if min(counts) != max(counts):
                shown = f"{min(counts)} to {max(counts)}"
                yield Problem(
                    promise="P13",
                    message=f"the ranks of step {step} have {shown} samples, not equally many",
                    step=step,
                )


def _if_any(promise: str, message: str, samples: IntArray) -> Iterator[Problem]:
    """Yield a problem that concerns samples, unless there are none of them."""
    if samples.size:
        yield _about(promise, message, samples)


def _about(promise: str, message: str, samples: IntArray) -> Problem:
    ids = tuple(np.unique(samples).tolist())
    shown = ", ".join(str(i) for i in ids[:_SHOWN])
    return Problem(
        promise=promise,
        message=f"{message}: {shown}{', ...' if len(ids) > _SHOWN else ''}",
        samples=ids,
    )


def _in_row(promise: str, message: str, plan: SchedulePlan, row: int) -> Problem:
    rank, number = divmod(row, plan.micro_batches_per_rank)
    samples = tuple(sorted(plan.micro_batch_samples(rank, number).tolist()))
    return Problem(
        promise=promise,
        message=(
            f"micro-batch {number} of rank {rank} {message} (samples"
            f" {', '.join(str(i) for i in samples[:_SHOWN])})"
        ),
        samples=samples,
        rank=rank,
        micro_batch=number,
        step=int(np.searchsorted(np.cumsum(plan.num_microbatches), number, side="right")),
    )
