"""The shape of a `schedule-plan.v1` document: names, dtypes and order; standard library only.

It is what another package may rely on. The JSON Schema of the same id ships as package data
(`schemas/schedule-plan.v1.json`) and a test holds the two equal. Within the major, keys are only
ever added.

Layout: micro-batches are numbered rank by rank and, inside a rank, in running order over all steps,
so that micro-batch `k` of rank `r` is row `r * sum(num_microbatches) + k` of `micro_batch_offsets`.
"""

from typing import Any, Final, Literal, TypedDict

from rl_schedule.contract_header import Producer

__all__ = [
    "ARRAY_NAMES",
    "CONTRACT_ID",
    "MINOR",
    "SETTINGS_OF_MINOR_0",
    "ArrayDocument",
    "CostDocument",
    "PlanArrays",
    "SchedulePlanDocument",
]

CONTRACT_ID: Final = "schedule-plan.v1"
"""Id of the document this package writes; the major is part of it."""

MINOR: Final = 1
"""Minor of the documents written by this version. A reader of the same major accepts any minor."""


class ArrayDocument(TypedDict):
    """One named array: `data` holds the values in row-major order."""

    dtype: Literal["int64"]
    shape: list[int]
    data: list[int]


class PlanArrays(TypedDict):
    """The arrays beside the header.

    M = micro-batches per rank over all steps, S = steps, D = ranks.
    """

    micro_batch_offsets: ArrayDocument
    """[D * M + 1]: row `b` owns `sample_positions[offsets[b]:offsets[b + 1]]`."""
    sample_positions: ArrayDocument
    """[kept samples]: rollout positions, 0-based, in micro-batch order."""
    num_microbatches: ArrayDocument
    """[S]: micro-batches of one rank in each step; the same on every rank."""
    global_batch_sizes: ArrayDocument
    """[S]: rollouts of each step."""
    dropped_samples: ArrayDocument
    """[]: rollout positions that run nowhere, ascending."""
    dropped_rollouts: ArrayDocument
    """[]: rollout ids that run nowhere, in first-occurrence order."""
    oversized_samples: ArrayDocument
    """[]: rollout positions with more padded tokens than the cap, ascending; alone or dropped.

    Since minor 1 also those that exceed it with the samples they are kept together with.
    """
    filler_micro_batches: ArrayDocument
    """[F, 2]: (rank, micro-batch of that rank) of each micro-batch without samples."""


ARRAY_NAMES: Final = tuple(PlanArrays.__annotations__)
"""The arrays of a plan, in the order in which the digest reads them."""


SETTINGS_OF_MINOR_0: Final = (
    "global_batch_size",
    "dp_size",
    "cp_size",
    "vpp_size",
    "microbatch_group_size_per_vp_stage",
    "max_tokens_per_gpu",
    "micro_batch_size",
    "balance",
    "rank_slack",
    "cost",
    "splitter",
    "on_oversized",
    "on_misaligned",
    "on_trailing",
    "pad_to_multiple",
)
"""Settings that every document has."""


class CostDocument(TypedDict):
    """The cost model in words that survive JSON; `kind` is one of this package or `"custom"`."""

    kind: str
    parameters: dict[str, Any]


class _SinceMinor1(TypedDict, total=False):
    """Keys that documents of minor 0 lack."""

    settings_digest: str
    """sha256, in hex, of `settings` as JSON with sorted keys and without spaces; absent: unknown.

    The digest of the plan leaves settings out, so that equal plans have equal digests.
    """
    rollout_names: list[str]
    """Strings behind rollout ids 0, 1, ...; empty or absent: the ids are the caller's integers."""


class SchedulePlanDocument(_SinceMinor1):
    """The whole document."""

    contract: Literal["schedule-plan.v1"]
    minor: int
    producer: Producer
    dp_size: int
    digest: str
    settings: dict[str, Any]
    """The request without its data: every field of `ScheduleRequest` but its columns.

    Since minor 1 there may be more than `SETTINGS_OF_MINOR_0`; one that is absent has its default.
    """
    stats: dict[str, Any]
    """Every field of `ScheduleStats`; `steps` lists the fields of `StepStats`."""
    arrays: PlanArrays
