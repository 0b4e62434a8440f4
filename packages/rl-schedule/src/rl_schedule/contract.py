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
    "ArrayDocument",
    "CostDocument",
    "PlanArrays",
    "SchedulePlanDocument",
]

CONTRACT_ID: Final = "schedule-plan.v1"
"""Id of the document this package writes; the major is part of it."""

MINOR: Final = 0
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
    """[]: rollout positions with more padded tokens than the cap, ascending; alone or dropped."""
    filler_micro_batches: ArrayDocument
    """[F, 2]: (rank, micro-batch of that rank) of each micro-batch without samples."""


ARRAY_NAMES: Final = tuple(PlanArrays.__annotations__)
"""The arrays of a plan, in the order in which the digest reads them."""


class CostDocument(TypedDict):
    """The cost model in words that survive JSON; `kind` is one of this package or `"custom"`."""

    kind: str
    parameters: dict[str, Any]


class SchedulePlanDocument(TypedDict):
    """The whole document."""

    contract: Literal["schedule-plan.v1"]
    minor: int
    producer: Producer
    dp_size: int
    digest: str
    settings: dict[str, Any]
    """The request without its data: every field of `ScheduleRequest` but the two columns."""
    stats: dict[str, Any]
    """Every field of `ScheduleStats`; `steps` lists the fields of `StepStats`."""
    arrays: PlanArrays
