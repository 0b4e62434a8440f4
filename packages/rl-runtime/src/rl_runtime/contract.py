"""The document that the rollout side hands to the trainers: `rollout-batch.v1`.

A document is a JSON object and named arrays beside it. Arrays hold one entry per sample, in rollout
order. A column with one array per sample is two arrays: `tokens` has all samples' values end to
end, `tokens.offsets` says where each begins. Names, dtypes and alignments are those of the field
table in the documentation; `FIELDS` is that table.

Invariants, each matched by a test in `tests/contracts`: the JSON Schema in
`schemas/rollout-batch.v1.json` and `RolloutBatchDocument` name the same keys; `READS` and `WRITES`
are what the package's metadata says.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from importlib import resources
from typing import Any, Literal, TypedDict

from rl_runtime.errors import UnsupportedContractError

__all__ = [
    "FIELDS",
    "MINOR",
    "OFFSETS",
    "READS",
    "ROLLOUT_BATCH",
    "WRITES",
    "ArrayDescription",
    "Producer",
    "RolloutBatchDocument",
    "check_contract",
    "load_schema",
    "log_newer_minor",
]

ROLLOUT_BATCH: Literal["rollout-batch.v1"] = "rollout-batch.v1"
"""Id of the contract that this package writes, with the major version in it."""
MINOR = 0
"""Minor version: rises when fields are added."""
WRITES = (ROLLOUT_BATCH,)
"""Ids that this package writes."""
READS = (
    "schedule-plan.v1",
    "metric-record.v1",
    "nucleus-set.v1",
    "train-dump.v2",
    "rollout-dump.v1",
)
"""Ids that this package reads."""
OFFSETS = ".offsets"
"""End of the name of the array that says where each sample begins in the array of the same name."""

FIELDS: dict[str, tuple[str, bool]] = {
    "rollout_position": ("int64", False),
    "sample_index": ("int64", False),
    "rollout_ids": ("int64", False),
    "group_ids": ("int64", False),
    "tokens": ("int64", True),
    "total_lengths": ("int64", False),
    "response_lengths": ("int64", False),
    "loss_masks": ("int32", True),
    "raw_reward": ("float64", False),
    "rewards": ("float64", False),
    "rollout_log_probs": ("float32", True),
    "rollout_full_log_probs": ("float32", True),
    "nucleus_ids": ("int32", True),
    "nucleus_offsets": ("int64", True),
    "nucleus_status": ("uint8", True),
    "weight_versions": ("int64", True),
    "truncated": ("bool", False),
    "loss_denominators": ("float32", False),
    "step": ("int64", False),
}
"""By name: dtype, and whether a sample has an array of its own.

`sample_index` is -1 where the data source gave none.
"""

_log = logging.getLogger(__name__)


class ArrayDescription(TypedDict):
    """dtype and shape of one array beside the document."""

    dtype: str
    """A numpy name."""
    shape: list[int]
    """One entry: the number of elements."""


class Producer(TypedDict):
    """Who wrote a document."""

    distribution: str
    """Name of the distribution, such as "rl-runtime"."""
    version: str
    """Its version."""


class RolloutBatchDocument(TypedDict):
    """The JSON part of a rollout batch."""

    contract: Literal["rollout-batch.v1"]
    """The id."""
    minor: int
    """Minor version of the writer."""
    producer: Producer
    """Who wrote it."""
    batch_id: int
    """Loop counter."""
    num_samples: int
    """N, entries of every column."""
    arrays: dict[str, ArrayDescription]
    """The arrays beside the document."""


def check_contract(found: object, expected: str) -> None:
    """Compare a document's id with the one that a reader supports.

    Raises:
        UnsupportedContractError: they differ; the message names both.
    """
    if found != expected:
        raise UnsupportedContractError(
            f"the document has the contract {found!r}, this version reads {expected!r}: use the"
            " versions of the packages that were released together"
        )


@cache
def log_newer_minor(minor: int) -> None:
    """Say once that a document has keys which this version ignores."""
    _log.warning(
        "%s: minor %d is newer than %d; keys that this version does not know are ignored",
        ROLLOUT_BATCH,
        minor,
        MINOR,
    )


def load_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of `rollout-batch.v1`."""
    text = (
        resources.files(__package__)
        .joinpath("schemas", f"{ROLLOUT_BATCH}.json")
        .read_text(encoding="utf-8")
    )
    schema: dict[str, Any] = json.loads(text)
    return schema
