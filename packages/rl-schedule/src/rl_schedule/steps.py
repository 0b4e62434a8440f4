"""Rollouts and optimizer steps: which rollouts train in which step, and which not at all.

Invariants: samples of a rollout never part (P5), every sample is in exactly one step or in the
dropped list (P3), and nothing is dropped without being listed.

Axis letters: N samples, R rollouts, S steps.
"""

import logging
import pkgutil
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, cast

import numpy as np

from rl_schedule.arrays import IntArray, positive_int
from rl_schedule.cost import name_of
from rl_schedule.errors import InfeasibleScheduleError, ScheduleError

__all__ = [
    "Rollouts",
    "StepSplitter",
    "compute_dynamic_global_batch_size",
    "cut_steps",
    "group_rollouts",
    "load_splitter",
]

_log = logging.getLogger("rl_schedule")


class StepSplitter(Protocol):
    """Decides how many rollouts each step takes, in rollout order."""

    def __call__(
        self,
        *,
        rollout_samples: IntArray,
        rollout_tokens: IntArray,
        global_batch_size: int | None,
        dp_size: int,
    ) -> Sequence[int]:
        """Return the rollouts of each step.

        Args:
            rollout_samples: int64 [R], samples of each rollout, first-occurrence order.
            rollout_tokens: int64 [R], padded tokens of each rollout.
            global_batch_size: rollouts per step as configured, or None.
            dp_size: data-parallel ranks.

        Returns:
            Rollouts per step, each >= 1, summing to at most R. The rest is trailing and follows
            `on_trailing`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Samples grouped by rollout, in first-occurrence order of the ids."""

    ids: IntArray
    """[R] rollout ids."""
    offsets: IntArray
    """[R + 1]: rollout `j` owns `positions[offsets[j]:offsets[j + 1]]`."""
    positions: IntArray
    """[N] rollout positions, ascending inside a rollout."""

    def __len__(self) -> int:
        """Return the number of rollouts."""
        return int(self.ids.size)


def compute_dynamic_global_batch_size(num_rollouts: int, dp_size: int) -> int:
    """Return the largest multiple of `dp_size` that `num_rollouts` fill, at least `dp_size`.

    `max(dp_size, floor(num_rollouts / dp_size) * dp_size)`: a global batch that takes all of a
    batch but the remainder. Example: 13 rollouts on 4 ranks give 12; 3 rollouts on 4 ranks give 4.

    Raises:
        ScheduleError: either number below 1.
    """
    rollouts, ranks = positive_int(num_rollouts, "num_rollouts"), positive_int(dp_size, "dp_size")
    return max(ranks, rollouts // ranks * ranks)


def group_rollouts(rollout_ids: IntArray) -> Rollouts:
    """Group rollout positions by id, first-occurrence order; O(N log N).

    Example: ids [7, 3, 7] give ids [7, 3], offsets [0, 2, 3], positions [0, 2, 1].
    """
    ids, first, inverse, counts = np.unique(
        rollout_ids, return_index=True, return_inverse=True, return_counts=True
    )
    # unique sorts by id; `order` says which of them comes first in the batch, and its argsort (the
    # inverse of a permutation) gives each id its rollout number.
    order = np.argsort(first, kind="stable")
    number_N = np.argsort(order)[inverse.reshape(-1)]
    positions = np.argsort(number_N, kind="stable").astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts[order])]).astype(np.int64)
    return Rollouts(ids=ids[order].astype(np.int64), offsets=offsets, positions=positions)


def load_splitter(path: str) -> StepSplitter:
    """Import the splitter that `package.module:name` names.

    Raises:
        ScheduleError: the path is malformed, does not import, or names something that cannot be
            called.
    """
    # resolve_name also takes a dotted path without a colon, which could name the wrong thing.
    if not all(path.partition(":")):
        raise ScheduleError(
            'splitter must be "fixed", "sizes", "all" or an import path "package.module:name", got'
            f" {path!r}"
        )
    try:
        target: object = pkgutil.resolve_name(path)
    except Exception as error:  # Whatever the module does while it is imported.
        raise ScheduleError(
            f"splitter {path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(target):
        raise ScheduleError(
            f"splitter {path!r} is a {type(target).__name__}, expected a callable StepSplitter"
        )
    return cast("StepSplitter", target)


def cut_steps(
    rollouts: Rollouts,
    lengths: IntArray,
    *,
    global_batch_size: int | Sequence[int] | None,
    splitter: str | StepSplitter,
    on_trailing: str,
    dp_size: int,
    dropped: str = "",
) -> list[int]:
    """Cut `rollouts` into steps by the splitter and the trailing policy.

    Args:
        rollouts: the rollouts that may train.
        lengths: int64 [N], padded tokens of every sample of the batch.
        global_batch_size: rollouts per step, or a list of them under `sizes`.
        splitter: how to cut.
        on_trailing: what to do with rollouts that fill no step.
        dp_size: data-parallel ranks, for splitters that ask.
        dropped: why rollouts are missing here and what to do about it, for the error of a batch
            that fills no step because of it.

    Returns:
        [S] rollouts of each step, in order; those after the last step are dropped.

    Raises:
        InfeasibleScheduleError: trailing rollouts under `error`, or not one full step under `drop`.
        ScheduleError: a user splitter that returns no valid list.
    """
    available = len(rollouts)
    if splitter == "all":
        return [available] if available else []
    if splitter == "fixed":
        size = cast("int", global_batch_size)
        wanted = [size] * -(-available // size)
    elif splitter == "sizes":
        wanted = list(cast("Sequence[int]", global_batch_size))
    else:
        function = load_splitter(splitter) if isinstance(splitter, str) else splitter
        wanted = _ask(function, rollouts, lengths, cast("int | None", global_batch_size), dp_size)
    return _apply_trailing(
        wanted,
        available,
        on_trailing,
        first_step=wanted[0] if wanted else global_batch_size,
        dropped=dropped,
    )


def _apply_trailing(
    wanted: list[int], available: int, on_trailing: str, *, first_step: object, dropped: str
) -> list[int]:
    """Keep the wanted steps that `available` rollouts fill and apply the policy to what is left."""
    # Python integers: a sum of sizes may not fit int64.
    ends = [0, *accumulate(wanted)]
    # The last end that is not beyond what there is, so that so many steps are full.
    full = bisect_right(ends, available) - 1
    trailing = available - ends[full]
    if on_trailing == "error" and (trailing or full < len(wanted)):
        raise InfeasibleScheduleError(
            f"{available} rollouts do not fill steps of {_shortened(wanted)} rollouts: {trailing}"
            f" are left over and {len(wanted) - full} steps are short; change global_batch_size or"
            ' set on_trailing to "drop" or "partial_step"'
        )
    sizes = wanted[:full]
    if on_trailing == "partial_step":
        return [*sizes, trailing] if trailing else sizes
    if not full:
        raise InfeasibleScheduleError(
            f"{available} rollouts are fewer than the {first_step} of one step and on_trailing is "
            f'"{on_trailing}", so nothing would train; '
            + (dropped or 'gather more rollouts or set on_trailing="partial_step"')
        )
    if trailing:
        _log.warning(
            "dropping %d of %d rollouts that do not fill a step of %s",
            trailing,
            available,
            _shortened(wanted[full:]) or first_step,
        )
    return sizes


def _ask(
    function: StepSplitter,
    rollouts: Rollouts,
    lengths: IntArray,
    global_batch_size: int | None,
    dp_size: int,
) -> list[int]:
    """Call a user splitter and check its answer."""
    name = name_of(function)
    try:
        # `list` inside: a generator of the user's runs here. reduceat: one sum for each rollout.
        answer = list(
            function(
                rollout_samples=np.diff(rollouts.offsets),
                rollout_tokens=np.add.reduceat(lengths[rollouts.positions], rollouts.offsets[:-1]),
                global_batch_size=global_batch_size,
                dp_size=dp_size,
            )
        )
    except Exception as error:
        raise ScheduleError(
            f"the splitter {name} failed with {type(error).__name__}: {error}; it must return the"
            f" rollouts of each step as a list of integers, for {len(rollouts)} rollouts"
        ) from error
    sizes = [positive_int(size, f"a step size returned by the splitter {name}") for size in answer]
    if sum(sizes) > len(rollouts):
        raise ScheduleError(
            f"the splitter asked for {sum(sizes)} rollouts in {len(sizes)} steps, but there are"
            f" {len(rollouts)}"
        )
    return sizes


def _shortened(sizes: Sequence[int]) -> str:
    """Write step sizes for a message, at most five of them."""
    shown = ", ".join(str(size) for size in sizes[:5])
    return shown + (", ..." if len(sizes) > 5 else "")
