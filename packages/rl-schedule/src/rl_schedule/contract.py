"""The shape of a `schedule-plan.v1` document: names, dtypes and order; standard library only.

Decides what another package may rely on. The JSON Schema of the same id ships as package data
(`schemas/schedule-plan.v1.json`) and a test holds the two equal. Within the major, keys are only
ever added.

Layout: micro-batches are numbered rank by rank and, inside a rank, in running order over all steps,
so that micro-batch `k` of rank `r` is row `r * sum(num_microbatches) + k` of `micro_batch_offsets`.
"""

import json
from importlib import resources
from typing import Any, Final, Literal, TypedDict

__all__ = [
    "ARRAY_NAMES",
    "CONTRACT_ID",
    "MINOR",
    "READ_BATCH_ID",
    "READ_DUMP_ID",
    "ArrayDocument",
    "CostDocument",
    "PlanArrays",
    "Producer",
    "SchedulePlanDocument",
    "SettingsDocument",
    "StatsDocument",
    "StepStatsDocument",
    "load_schema",
]

CONTRACT_ID: Final = "schedule-plan.v1"
"""Id of the document this package writes; the major is part of it."""

MINOR: Final = 0
"""Minor of the documents written by this version. A reader of the same major accepts any minor."""

READ_BATCH_ID: Final = "rollout-batch.v1"
"""Id of the JSON document whose columns `total_lengths` and `rollout_ids` the command line reads."""

READ_DUMP_ID: Final = "rollout-dump.v1"
"""Id of the Parquet file whose columns `total_lengths` and `rollout_ids` the command line reads."""

ArrayName = Literal[
    "micro_batch_offsets",
    "sample_positions",
    "num_microbatches",
    "global_batch_sizes",
    "dropped_samples",
    "dropped_rollouts",
    "oversized_samples",
    "filler_micro_batches",
]

ARRAY_NAMES: Final[tuple[ArrayName, ...]] = (
    "micro_batch_offsets",
    "sample_positions",
    "num_microbatches",
    "global_batch_sizes",
    "dropped_samples",
    "dropped_rollouts",
    "oversized_samples",
    "filler_micro_batches",
)
"""The arrays of a plan, in the order in which the digest reads them."""


class Producer(TypedDict):
    """Who wrote the document."""

    distribution: str
    version: str


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
    """[]: rollout positions whose padded length exceeds the token cap, ascending; placed alone or dropped."""
    filler_micro_batches: ArrayDocument
    """[F, 2]: (rank, micro-batch of that rank) of each micro-batch without samples."""


class CostDocument(TypedDict):
    """The cost model in words that survive JSON: `kind` names a class of this package or is `"custom"`."""

    kind: str
    parameters: dict[str, Any]


class SettingsDocument(TypedDict):
    """The request without its data: every keyword of `build_dp_schedule` but the two columns."""

    global_batch_size: int | list[int] | None
    dp_size: int
    cp_size: int
    vpp_size: int
    microbatch_group_size_per_vp_stage: int
    max_tokens_per_gpu: int | None
    micro_batch_size: int | None
    balance: str
    rank_slack: float | str
    cost: CostDocument
    splitter: str
    on_oversized: str
    on_misaligned: str
    on_trailing: str
    pad_to_multiple: int


class StepStatsDocument(TypedDict):
    """Figures of one step; see `StepStats` for units."""

    num_rollouts: int
    num_samples: int
    num_tokens: int
    micro_batches: int
    micro_batch_bound: int
    fillers: int
    fill: float | None
    rank_imbalance: float
    rank_bound: float
    slot_imbalance: float
    slot_bound: float
    rank_slack: float
    path: str
    mean_rank_cost: float


class StatsDocument(TypedDict):
    """Figures of the whole plan; see `ScheduleStats` for units."""

    fill: float | None
    rank_imbalance: float
    rank_bound: float
    slot_imbalance: float
    slot_bound: float
    micro_batches: int
    micro_batch_bound: int
    wall_seconds: float
    steps: list[StepStatsDocument]


class SchedulePlanDocument(TypedDict):
    """The whole document."""

    contract: Literal["schedule-plan.v1"]
    minor: int
    producer: Producer
    dp_size: int
    digest: str
    settings: SettingsDocument
    stats: StatsDocument
    arrays: PlanArrays


def load_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of `schedule-plan.v1` as a dictionary."""
    text = (
        resources.files(__package__)
        .joinpath("schemas", f"{CONTRACT_ID}.json")
        .read_text(encoding="utf-8")
    )
    schema: dict[str, Any] = json.loads(text)
    return schema
