"""The document that the rollout side hands to the trainers: `rollout-batch.v1`. Layer: contract (standard library only).

A document is a header and named arrays beside it. Arrays hold one entry per sample, in rollout order, or one array per sample (ragged).
"""

from __future__ import annotations

from typing import Literal, TypedDict

from rl_runtime.errors import UnsupportedContractError

__all__ = ["MINOR", "READS", "ROLLOUT_BATCH", "WRITES", "RolloutBatchHeader", "check_contract"]

ROLLOUT_BATCH: Literal["rollout-batch.v1"] = "rollout-batch.v1"
"""Id of the contract that this package writes, with the major version in it."""
MINOR = 0
"""Minor version: rises when fields are added."""
WRITES = (ROLLOUT_BATCH,)
"""Ids that this package writes."""
READS = ("schedule-plan.v1", "metric-record.v1", "nucleus-set.v1", "train-dump.v2", "rollout-dump.v1")
"""Ids that this package reads."""


class RolloutBatchHeader(TypedDict):
    """Header of a rollout batch."""

    contract: Literal["rollout-batch.v1"]
    """The id."""
    minor: int
    """Minor version of the writer."""
    producer: str
    """Distribution and version of the writer, such as "rl-runtime 0.1.0"."""
    batch_id: int
    """Loop counter."""


def check_contract(found: object, expected: str) -> None:
    """Compare a document's id with the one that a reader supports.

    Raises:
        UnsupportedContractError: they differ; the message names both.
    """
    if found != expected:
        msg = f"the document has the contract {found!r}, this version reads {expected!r}: use the versions of the packages that were released together"
        raise UnsupportedContractError(msg)
