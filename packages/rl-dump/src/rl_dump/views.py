"""Decide how documents that other packages own become columns of a dump.

A view takes the few keys it needs of `schedule-plan.v1`, `nucleus-set.v1`, `metric-record.v1` or
`rollout-batch.v1`, and ignores the rest. Nothing of the owning package is imported.

Invariants, each matched by a test in `tests/golden/test_neighbours.py`: another contract id is
refused, naming both ids; a newer minor is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rl_dump.errors import DumpError, UnsupportedContractError
from rl_dump.ragged import RaggedArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "batch_columns",
    "metric_values",
    "nucleus_columns",
    "plan_columns",
    "plan_dropped",
    "plan_fillers",
]

_OFFSETS = ".offsets"


def plan_columns(document: Mapping[str, Any], num_samples: int) -> dict[str, NDArray[np.int64]]:
    """Say where a schedule plan runs each sample.

    Args:
        document: `schedule-plan.v1`.
        num_samples: samples of the rollout batch.

    Returns:
        `step`, `micro_batch` (counted inside the step) and `data_parallel_rank`: int64
        [num_samples] by rollout position, -1 where dropped.

    Raises:
        UnsupportedContractError: another contract.
        DumpError: a key is missing, or the plan has a position outside the batch.
    """
    _check(document, "schedule-plan.v1")
    try:
        arrays = {
            name: np.array(document["arrays"][name]["data"], np.int64)
            for name in ("micro_batch_offsets", "sample_positions", "num_microbatches")
        }
        ranks = int(document["dp_size"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DumpError(
            f"schedule-plan.v1: cannot read {error}; write the plan again with rl-schedule"
        ) from error
    per_step, positions = arrays["num_microbatches"], arrays["sample_positions"]
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < num_samples:
        raise DumpError(
            f"schedule-plan.v1: has position {int(positions.max())}, but the batch has"
            f" {num_samples} samples; is it of another batch?"
        )
    slots = np.concatenate(
        [np.arange(count) for count in per_step.tolist()] or [np.zeros(0, np.int64)]
    )
    sizes = np.diff(arrays["micro_batch_offsets"])
    places = {
        "step": np.tile(np.repeat(np.arange(per_step.size), per_step), ranks),
        "micro_batch": np.tile(slots, ranks),
        "data_parallel_rank": np.repeat(np.arange(ranks), int(per_step.sum())),
    }
    columns = {}
    for name, place in places.items():
        columns[name] = np.full(num_samples, -1, np.int64)
        columns[name][positions] = np.repeat(place, sizes)
    return columns


def plan_dropped(document: Mapping[str, Any]) -> list[int]:
    """Return the rollout positions a schedule plan drops, in its order.

    Args:
        document: `schedule-plan.v1`.

    Raises:
        UnsupportedContractError: another contract.
        DumpError: a key is missing or not numeric.
    """
    _check(document, "schedule-plan.v1")
    positions: list[int] = _plan_array(document, "dropped_samples", -1).tolist()
    return positions


def plan_fillers(document: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the micro-batches without samples as (data-parallel rank, micro-batch counted over all steps); raises as `plan_dropped`."""
    _check(document, "schedule-plan.v1")
    return [
        (int(rank), int(slot))
        for rank, slot in _plan_array(document, "filler_micro_batches", -1, 2).tolist()
    ]


def _plan_array(document: Mapping[str, Any], name: str, *shape: int) -> NDArray[np.int64]:
    try:
        return np.array(document["arrays"][name]["data"], np.int64).reshape(shape)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DumpError(
            f"schedule-plan.v1: cannot read {name} ({error}); write the plan again with rl-schedule"
        ) from error


def nucleus_columns(
    document: Mapping[str, Any], arrays: Mapping[str, ArrayLike]
) -> dict[str, NDArray[Any]]:
    """Name the arrays of one sample's kept sets as a dump does.

    Args:
        document: `nucleus-set.v1`.
        arrays: `ids`, `offsets`, `status` beside it.

    Returns:
        `nucleus_ids` int32 [nnz], `nucleus_offsets` int64 [R+1], `nucleus_status` uint8 [R].

    Raises:
        UnsupportedContractError: another contract.
        DumpError: an array is missing.
    """
    _check(document, "nucleus-set.v1")
    dtypes = {"ids": np.int32, "offsets": np.int64, "status": np.uint8}
    missing = sorted(set(dtypes) - set(arrays))
    if missing:
        raise DumpError(f"nucleus-set.v1: the arrays {missing} are missing beside the document")
    return {f"nucleus_{name}": np.asarray(arrays[name], dtype) for name, dtype in dtypes.items()}


def metric_values(document: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the number of every metric, to stand in a dump's metadata.

    Args:
        document: `metric-record.v1`.

    Returns:
        By name: the mean where the kind is a mean or moments, the numerator otherwise; None for a
            mean of nothing. Histograms are left out.

    Raises:
        UnsupportedContractError: another contract.
        DumpError: a record lacks a key.
    """
    _check(document, "metric-record.v1")
    values: dict[str, float | None] = {}
    try:
        for record in document["records"]:
            numerator, weight = record["numerator"], float(record["weight"])
            if record["kind"] == "histogram":
                continue
            if record["kind"] in {"mean", "moments"}:
                values[record["name"]] = float(numerator) / weight if weight else None
            else:
                values[record["name"]] = None if numerator is None else float(numerator)
    except (KeyError, TypeError, ValueError) as error:
        raise DumpError(f"metric-record.v1: a record cannot be read: {error}") from error
    return values


def batch_columns(
    document: Mapping[str, Any], arrays: Mapping[str, ArrayLike]
) -> dict[str, NDArray[Any] | RaggedArray]:
    """Return the columns of a rollout batch as a dump takes them.

    Args:
        document: `rollout-batch.v1`.
        arrays: the arrays beside it, with the dtypes the document states. A name with `.offsets`
            belongs to the column of that name.

    Returns:
        Per column an array [N], or a `RaggedArray` of N items.

    Raises:
        UnsupportedContractError: another contract.
        DumpError: an array is missing.
    """
    _check(document, "rollout-batch.v1")
    described = document.get("arrays", {})
    missing = sorted(set(described) - set(arrays))
    if missing:
        raise DumpError(f"rollout-batch.v1: the arrays {missing} are missing beside the document")
    held = {
        name: np.asarray(arrays[name], np.dtype(about["dtype"]))
        for name, about in described.items()
    }
    names = [name for name in held if not name.endswith(_OFFSETS)]
    return {
        name: (
            RaggedArray(held[name], held[name + _OFFSETS])
            if name + _OFFSETS in held
            else held[name]
        )
        for name in names
    }


def _check(document: Mapping[str, Any], expected: str) -> None:
    found = document.get("contract")
    if found != expected:
        raise UnsupportedContractError(
            f"contract {found!r}, but this rl-dump reads {expected!r}; upgrade the older of the two"
            " packages"
        )
