"""What is asked for: a schedule's request, and which samples start with the same tokens.

Invariant: a request that exists is well-formed and asks for nothing that plans with shared prefixes
cannot honour; whatever is wrong is told at once.
"""

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

import numpy as np

from rl_schedule.arrays import Identifiers, IntArray, Integers, identifier_column, integer_column
from rl_schedule.cost import TokenCost
from rl_schedule.errors import ScheduleError
from rl_schedule.prefix.cost import PrefixCost
from rl_schedule.request import ScheduleRequest

__all__ = ["PrefixRequest", "check_prefix_request"]

_HONOURED = frozenset(
    {
        "total_lengths",
        "rollout_ids",
        "rollout_names",
        "global_batch_size",
        "dp_size",
        "extra_micro_batches",
        "cp_size",
        "vpp_size",
        "microbatch_group_size_per_vp_stage",
        "max_tokens_per_gpu",
        "cost",
        "splitter",
        "on_oversized",
        "on_misaligned",
        "on_trailing",
    }
)
"""Fields of a schedule's request that mean here what they mean there, whatever they hold.

Leave to run one more micro-batch is never used.
"""

_REASONS = {
    "micro_batch_size": "use max_tokens_per_gpu: a fixed count of samples has no room to save",
    "balance": 'use "flops" or "tokens": the arrival-order mode does not keep groups together',
    "rank_slack": "leave it at 0: ranks are levelled, slots are not traded for them",
    "pad_to_multiple": "leave it at 1: the trainer pads the stream of a micro-batch at its end",
}

_SHOWN = 5
"""Samples named in one message."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixRequest:
    """One rollout batch, how it is to be trained, and the prefixes that its samples share.

    Example: three samples of 7, 6 and 5 tokens, the first two with one prompt of 4: `schedule` has
    `total_lengths=[7, 6, 5]`, and `prefix_ids=[0, 0, 1]`, `prefix_lengths=[4, 4, 2]`. A micro-batch
    of all three holds 4 + 3 + 2 + 2 + 3 = 14 tokens instead of 18.

    Raises:
        ScheduleError: columns that do not fit one another or the schedule, or a setting that plans
            with shared prefixes cannot honour; names all of them.
    """

    schedule: ScheduleRequest
    """Lengths of the whole samples, steps, ranks, cap, cost and policies.

    Its `cost` is that of a whole sample; see `PrefixCost` for what becomes of it. Static packing,
    `balance="none"`, a `rank_slack`, a `pad_to_multiple` and settings that are not known here are
    refused.
    """
    prefix_ids: Identifiers
    """Which prefix each sample starts with, usually its prompt group; [n].

    Kept as int64; strings are numbered by first appearance, see `prefix_names`.
    """
    prefix_lengths: Integers
    """Tokens of that prefix; [n], 0 to total - 1, equal for equal ids. Kept as int64."""
    prefix_names: tuple[str, ...] = field(init=False, default=())
    """What stands behind prefix ids 0, 1, ... where `prefix_ids` are strings, else nothing."""

    def __post_init__(self) -> None:
        """Freeze the columns as int64 and check them against the schedule."""
        problems: list[str] = []
        freeze = object.__setattr__
        try:
            ids, names = identifier_column(self.prefix_ids, "prefix_ids")
            freeze(self, "prefix_ids", ids)
            freeze(self, "prefix_names", names)
        except ScheduleError as error:
            problems.append(str(error))
        try:
            lengths = integer_column(self.prefix_lengths, "prefix_lengths")
            freeze(self, "prefix_lengths", lengths)
        except ScheduleError as error:
            problems.append(str(error))
        given: object = self.schedule
        if isinstance(given, ScheduleRequest):
            problems += _unknown_settings(given)
        else:
            problems.append(
                f"schedule must be a ScheduleRequest, got {type(given).__name__}; it holds the"
                " lengths, ranks and cap"
            )
        if not problems:
            problems += _column_problems(
                np.asarray(self.prefix_ids),
                np.asarray(self.prefix_lengths),
                np.asarray(self.schedule.total_lengths),
            )
        if problems:
            raise ScheduleError("; ".join(problems))

    @property
    def response_lengths(self) -> IntArray:
        """Tokens of each sample after its prefix, int64 [n], each >= 1."""
        lengths: IntArray = np.asarray(self.schedule.total_lengths, dtype=np.int64)
        return lengths - np.asarray(self.prefix_lengths, dtype=np.int64)

    @property
    def token_cap(self) -> int:
        """Tokens one micro-batch may hold, every prefix in it counted once."""
        cap = self.schedule.token_cap
        assert cap is not None, "static packing is refused"
        return cap

    @property
    def cost_model(self) -> PrefixCost:
        """The model that figures are in: the schedule's `cost`, or its default."""
        return PrefixCost(model=self.schedule.cost_model)

    @property
    def balance_model(self) -> PrefixCost:
        """The model that is levelled: tokens under `balance="tokens"`, else `cost_model`."""
        return (
            PrefixCost(model=TokenCost()) if self.schedule.balance == "tokens" else self.cost_model
        )


def check_prefix_request(request: object) -> None:
    """Refuse what is no `PrefixRequest`.

    Raises:
        ScheduleError: it says what to pass.
    """
    if not isinstance(request, PrefixRequest):
        raise ScheduleError(
            f"request must be a PrefixRequest, got {type(request).__name__}; pass"
            " PrefixRequest(schedule=..., prefix_ids=..., prefix_lengths=...)"
        )


def _unknown_settings(schedule: ScheduleRequest) -> Iterator[str]:
    """Name the settings that differ from their default and have no meaning here."""
    for entry in fields(schedule):
        value = getattr(schedule, entry.name)
        if entry.name in _HONOURED or (entry.name == "balance" and value != "none"):
            continue
        if not _is_default(entry, value):
            reason = _REASONS.get(entry.name, "leave it at its default")
            shown = "" if isinstance(value, np.ndarray) else f"={value!r}"
            yield f"{entry.name}{shown} is not possible with shared prefixes; {reason}"


def _is_default(entry: Field[Any], value: object) -> bool:
    default = entry.default if entry.default_factory is MISSING else entry.default_factory()
    return value is default or (not isinstance(value, np.ndarray) and value == default)


def _column_problems(ids: IntArray, prefixes: IntArray, totals: IntArray) -> Iterator[str]:
    """List what is wrong with the two columns beside the lengths of the samples."""
    if not ids.size == prefixes.size == totals.size:
        yield (
            f"total_lengths has {totals.size} samples, prefix_ids {ids.size} and prefix_lengths"
            f" {prefixes.size}; pass one of each per sample"
        )
        return
    bad = np.flatnonzero((prefixes < 0) | (prefixes >= totals))
    if bad.size:
        shown = ", ".join(f"{i} ({prefixes[i]} of {totals[i]} tokens)" for i in bad[:_SHOWN])
        yield (
            "a prefix has 0 tokens or more and leaves its sample at least one of its own, but not"
            f" that of sample {shown}{', ...' if bad.size > _SHOWN else ''}; pass the prompt's"
            " tokens alone"
        )
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    differing = np.flatnonzero(prefixes != prefixes[first[inverse.reshape(-1)]])
    if differing.size:
        shown = ", ".join(
            f"{i} (id {ids[i]}, {prefixes[i]} tokens)" for i in differing[:_SHOWN].tolist()
        )
        yield (
            "samples of one prefix id share the same tokens, but these have another length than"
            f" the first of their id: {shown}{', ...' if differing.size > _SHOWN else ''}; give"
            " them ids of their own"
        )
