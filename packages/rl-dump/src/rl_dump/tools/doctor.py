"""Which signs of trouble in a dump are worth an alarm.

Each check is one function from a dump to at most one alarm; `THRESHOLDS` says from where on.

Axes: N samples, R response tokens of a sample, T those of all samples, nnz nucleus ids of all
samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rl_dump.checks import placed_positions
from rl_dump.columns.ragged import RaggedArray
from rl_dump.contract import TRAIN_DUMP
from rl_dump.reader import Dump
from rl_dump.tools.replay import REPLAY_KEY
from rl_dump.tools.summary import summary
from rl_dump.tools.token_statistics import (
    log_prob_gap,
    nucleus_sizes,
    ragged_field,
    scalar_field,
    trained_tokens,
)

__all__ = ["THRESHOLDS", "Alarm", "Thresholds", "doctor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One sign of trouble."""

    code: str
    """Stable name of the check."""
    message: str
    """What was found, how much of it, and what to look at."""
    row: int | None = None
    """A row to look at first, 0-based; None if none stands out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From where on each check raises an alarm."""

    mean_log_prob_gap: float = 0.05
    """Mean |trainer - engine| log-prob over trained tokens, nats.

    Half precision alone stays below 0.03.
    """
    large_log_prob_gap: float = 1.0
    """A token's gap that no rounding explains, nats."""
    large_gap_fraction: float = 0.001
    """Part of the trained tokens that may have such a gap."""
    zero_std_fraction: float = 0.5
    """Part of the prompt groups whose rollouts may all have the same reward: they teach nothing."""
    truncated_fraction: float = 0.25
    """Part of the samples that may have been cut off at the length limit."""


THRESHOLDS = Thresholds()
"""The thresholds used unless others are given."""


def doctor(dump: Dump, thresholds: Thresholds = THRESHOLDS) -> list[Alarm]:
    """Run every check on a dump.

    Args:
        dump: a train or rollout dump; checks whose fields it lacks are skipped, and in an export of
            one micro-batch those that need the whole batch.
        thresholds: from where on a check raises an alarm.

    Returns:
        The alarms, empty if all is well.

    Raises:
        DumpError: a column is damaged.
    """
    partial = REPLAY_KEY in dump.metadata
    return [
        alarm
        for check in _CHECKS
        if not (partial and check in _OF_WHOLE_BATCHES)
        and (alarm := check(dump, thresholds)) is not None
    ]


def _non_finite(dump: Dump, _: Thresholds) -> Alarm | None:
    wrong = [
        (entry.name, entry.num_non_finite) for entry in summary(dump).fields if entry.num_non_finite
    ]
    if not wrong:
        return None
    row = next(
        (
            row
            for name, _ in wrong
            if name in dump.fields
            for row, value in enumerate(dump.column(name))
            if value is not None and not np.isfinite(np.asarray(value, np.float64)).all()
        ),
        None,
    )
    listed = ", ".join(f"{count} in {name}" for name, count in wrong)
    return Alarm(
        code="non-finite",
        message=f"NaN or infinite values where tokens were trained on: {listed}",
        row=row,
    )


def _gap(dump: Dump, thresholds: Thresholds) -> Alarm | None:
    gap, trained = log_prob_gap(dump), trained_tokens(dump)
    if gap is None:
        return None
    values = gap.values if trained is None else gap.values[trained]
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    mean, large = (
        float(values.mean(dtype=np.float64)),
        float((values > thresholds.large_log_prob_gap).mean()),
    )
    if mean <= thresholds.mean_log_prob_gap and large <= thresholds.large_gap_fraction:
        return None
    worst = int(np.argmax([float(np.fmax.reduce(item)) if len(item) else 0.0 for item in gap]))
    return Alarm(
        code="log-prob-gap",
        message=(
            f"|trainer - engine| log-prob is {mean:.4g} nats on average, {large:.2%} of the trained"
            f" tokens are above {thresholds.large_log_prob_gap:g}; were the weights synchronised,"
            " and the kept sets recorded?"
        ),
        row=worst,
    )


def _zero_std(dump: Dump, thresholds: Thresholds) -> Alarm | None:
    rewards = scalar_field(dump, "raw_reward")
    if rewards is None:
        rewards = _whole_batch_rewards(dump)
    groups = scalar_field(dump, "group_ids")
    if rewards is None or groups is None:
        return None
    rollouts = scalar_field(dump, "rollout_ids")
    executions = np.arange(len(groups)) if rollouts is None else rollouts
    by_group: dict[int, dict[int, float]] = {}
    for group, execution, reward in zip(
        groups.tolist(), executions.tolist(), rewards.tolist(), strict=True
    ):
        by_group.setdefault(group, {})[execution] = reward
    several = [set(found.values()) for found in by_group.values() if len(found) > 1]
    flat = sum(len(found) == 1 for found in several)
    if not several or flat / len(several) <= thresholds.zero_std_fraction:
        return None
    return Alarm(
        code="zero-std-groups",
        message=(
            f"in {flat} of {len(several)} prompt groups every rollout has the same reward: they"
            " teach nothing; are the prompts too easy or too hard?"
        ),
    )


def _whole_batch_rewards(dump: Dump) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    positions, whole = dump.positions(), dump.raw_reward
    if whole is None or not len(positions) or positions.max() >= len(whole):
        return None
    return np.asarray(whole, np.float64)[positions]


def _truncated(dump: Dump, thresholds: Thresholds) -> Alarm | None:
    flags = scalar_field(dump, "truncated")
    if flags is None or not flags.size or float(flags.mean()) <= thresholds.truncated_fraction:
        return None
    return Alarm(
        code="truncated",
        message=(
            f"{float(flags.mean()):.0%} of the samples were cut off at the length limit; does the"
            " reward pay for an unfinished answer?"
        ),
        row=int(np.argmax(flags)),
    )


def _dropped(dump: Dump, _: Thresholds) -> Alarm | None:
    if not dump.dropped:
        return None
    reasons = Counter(entry.get("reason", "no reason given") for entry in dump.dropped)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    return Alarm(
        code="dropped",
        message=f"{len(dump.dropped)} samples were generated but not trained on: {listed}",
    )


def _untrained(dump: Dump, _: Thresholds) -> Alarm | None:
    """Find rollouts that are masked for no reason the dump knows.

    Normal, and not counted: a sibling without trained tokens beside one that has some; rollouts
    that were cut off or have no advantage, which runs mask on purpose and which `truncated` and
    `zero-std-groups` watch over.
    """
    masks = ragged_field(dump, "loss_masks")
    if masks is None or dump.contract != TRAIN_DUMP:
        return None
    count = len(masks)
    rollouts, truncated = scalar_field(dump, "rollout_ids"), scalar_field(dump, "truncated")
    advantages = ragged_field(dump, "advantages")
    excused = _any_per_item(masks)
    excused |= np.zeros(count, bool) if truncated is None else truncated.astype(bool)
    if advantages is not None:
        excused |= (advantages.lengths > 0) & ~_any_per_item(advantages)
    of_rollout = (
        np.arange(count) if rollouts is None else np.unique(rollouts, return_inverse=True)[1]
    )
    fine = np.bincount(of_rollout, weights=excused) > 0
    rows = np.flatnonzero(~fine[of_rollout])
    if not rows.size:
        return None
    return Alarm(
        code="fully-masked",
        message=(
            f"{int((~fine).sum())} rollouts ({rows.size} samples) have no trained token, though"
            " they were not cut off and have an advantage: they cost time and teach nothing; how"
            " are their loss masks made?"
        ),
        row=int(rows[0]),
    )


def _any_per_item(column: RaggedArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    # Hits before each value; an item has one if the count grows between its two offsets. Unlike
    # `np.add.reduceat`, this is right for empty items.
    hits = np.concatenate([[0], np.cumsum(column.values != 0)])
    return np.asarray(np.diff(hits[column.offsets]) > 0)


def _no_signal(dump: Dump, _: Thresholds) -> Alarm | None:
    advantages = ragged_field(dump, "advantages")
    if advantages is None or not advantages.values.size or bool(advantages.values.any()):
        return None
    return Alarm(
        code="no-signal",
        message="every advantage is 0: this batch changes nothing but the weight decay",
    )


def _missing_shards(dump: Dump, _: Thresholds) -> Alarm | None:
    missing = sorted(placed_positions(dump.dp_shards) - set(dump.positions().tolist()))
    if not missing:
        return None
    return Alarm(
        code="incomplete",
        message=(
            f"{len(missing)} samples of the shards' partitions are not in the dump, the first at"
            f" rollout position {missing[0]}"
        ),
    )


def _outside_nucleus(dump: Dump, _: Thresholds) -> Alarm | None:
    """Find sampled ids that their own kept set lacks: the sampler could not have picked them."""
    sizes, ids = nucleus_sizes(dump), ragged_field(dump, "nucleus_ids")
    tokens, responses = ragged_field(dump, "tokens"), scalar_field(dump, "response_lengths")
    if (
        sizes is None
        or ids is None
        or tokens is None
        or responses is None
        or int(sizes.values.sum()) != len(ids.values)
    ):
        return None
    sampled = np.concatenate(
        [
            item[len(item) - length :]
            for item, length in zip(tokens, responses.tolist(), strict=True)
        ]
        or [np.zeros(0)]
    )
    if len(sampled) != len(sizes.values):
        return None
    # Each token's sampled id beside all ids of its nucleus [nnz]; hits are counted as above, so
    # that empty nuclei need no case of their own.
    hits = np.concatenate([[0], np.cumsum(np.repeat(sampled, sizes.values) == ids.values)])
    ends = np.cumsum(sizes.values)
    inside = hits[ends] > hits[ends - sizes.values]
    outside = (sizes.values > 0) & ~inside
    if not outside.any():
        return None
    row = int(np.searchsorted(sizes.offsets, np.flatnonzero(outside)[0], side="right")) - 1
    return Alarm(
        code="outside-kept-set",
        message=(
            f"{int(outside.sum())} sampled tokens are not in their own kept set; are the sets of"
            " another token or another sample?"
        ),
        row=row,
    )


_CHECKS: tuple[Callable[[Dump, Thresholds], Alarm | None], ...] = (
    _non_finite,
    _gap,
    _zero_std,
    _truncated,
    _dropped,
    _untrained,
    _no_signal,
    _missing_shards,
    _outside_nucleus,
)

_OF_WHOLE_BATCHES = frozenset({_zero_std, _truncated, _untrained, _no_signal})
"""Checks of parts of a batch, of groups, of rollouts: a micro-batch may hold any part of these."""
