"""Columns of a batch as `rollout-batch.v1`, and back: the form in which they go from process to
process.

Invariants, each matched by a test in `tests/contracts`:
`columns_of_document(*document_of_columns(columns))` gives the same columns in dtype and bits;
another contract id is refused; unknown columns are carried along.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from rl_dump import RaggedArray
from rl_runtime.batch.rank_batch import Column, RankBatch
from rl_runtime.contract import (
    FIELDS,
    MINOR,
    OFFSETS,
    ROLLOUT_BATCH,
    ArrayDescription,
    RolloutBatchDocument,
    check_contract,
    log_newer_minor,
)
from rl_runtime.errors import BatchMismatchError
from rl_schedule import RankView

__all__ = [
    "RankMessage",
    "columns_of_document",
    "document_of_columns",
    "message_of_rank_batch",
    "rank_batch_of_message",
]

Arrays = dict[str, npt.NDArray[Any]]


class RankMessage(TypedDict):
    """What one data-parallel rank is sent: a `rollout-batch.v1` document of its samples, and its part of the plan."""

    document: RolloutBatchDocument
    """Of the rank's samples, in the order of `plan.partition`."""
    arrays: Arrays
    """Beside the document."""
    plan: RankView
    """The rank's part of the plan."""
    step_units: npt.NDArray[np.float64]
    """float64 [steps]; see `RankBatch`."""


def message_of_rank_batch(batch: RankBatch) -> RankMessage:
    """Bring a rank's batch into the form in which it is sent; errors as for `document_of_columns`."""
    document, arrays = document_of_columns(batch.columns, batch_id=batch.batch_id)
    return {
        "document": document,
        "arrays": arrays,
        "plan": batch.plan,
        "step_units": batch.step_units,
    }


def rank_batch_of_message(message: RankMessage) -> RankBatch:
    """Read what `message_of_rank_batch` made, without copying arrays.

    Raises:
        UnsupportedContractError, BatchMismatchError: as for `columns_of_document`.
        BatchMismatchError: another number of samples than the plan gives this rank.
    """
    document = message["document"]
    columns = columns_of_document(document, message["arrays"])
    planned = len(message["plan"].partition)
    if document["num_samples"] != planned:
        raise BatchMismatchError(
            f"batch {document['batch_id']}: {document['num_samples']} samples came, the plan gives"
            f" this rank {planned}"
        )
    return RankBatch(
        batch_id=document["batch_id"],
        plan=message["plan"],
        columns=columns,
        step_units=message["step_units"],
    )


def document_of_columns(
    columns: Mapping[str, Column], *, batch_id: int
) -> tuple[RolloutBatchDocument, Arrays]:
    """Split columns into the document and the arrays beside it.

    Args:
        columns: over N samples, by name.
        batch_id: loop counter.

    Raises:
        BatchMismatchError: a column that the contract names has another dtype or form, or another
            number of samples; lists all.
    """
    problems = [problem for name, column in columns.items() for problem in _problems(name, column)]
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        problems.append(f"columns have unequal numbers of samples: {counts}")
    if problems:
        raise BatchMismatchError(f"batch {batch_id}: " + "; ".join(problems))
    arrays: Arrays = {}
    for name, column in columns.items():
        if isinstance(column, RaggedArray):
            arrays |= {name: column.values, name + OFFSETS: column.offsets}
        else:
            arrays[name] = column
    described: dict[str, ArrayDescription] = {
        name: {"dtype": array.dtype.name, "shape": list(array.shape)}
        for name, array in arrays.items()
    }
    document: RolloutBatchDocument = {
        "contract": ROLLOUT_BATCH,
        "minor": MINOR,
        "producer": {"distribution": "rl-runtime", "version": version("rl-runtime")},
        "batch_id": batch_id,
        "num_samples": next(iter(counts.values()), 0),
        "arrays": described,
    }
    return document, arrays


def columns_of_document(
    document: Mapping[str, Any], arrays: Mapping[str, npt.ArrayLike]
) -> dict[str, Column]:
    """Put a document and its arrays together again.

    Raises:
        UnsupportedContractError: another contract id.
        BatchMismatchError: an array is missing, has another size than the document says, or a
            column another dtype than the contract; lists all.
    """
    check_contract(document.get("contract"), ROLLOUT_BATCH)
    minor = document.get("minor", 0)
    if isinstance(minor, int) and minor > MINOR:
        log_newer_minor(minor)
    described: Mapping[str, ArrayDescription] = document["arrays"]
    missing = sorted(set(described) - set(arrays))
    if missing:
        raise BatchMismatchError(
            f"batch {document.get('batch_id')}: the arrays {missing} are missing beside the"
            " document"
        )
    held = {
        name: np.asarray(arrays[name], np.dtype(about["dtype"]))
        for name, about in described.items()
    }
    problems = [
        f"{name} has shape {list(held[name].shape)}, not {about['shape']}"
        for name, about in described.items()
        if list(held[name].shape) != about["shape"]
    ]
    columns: dict[str, Column] = {}
    for name, array in held.items():
        if not name.endswith(OFFSETS):
            columns[name] = (
                RaggedArray(array, held[name + OFFSETS]) if name + OFFSETS in held else array
            )
    problems += [problem for name, column in columns.items() for problem in _problems(name, column)]
    if problems:
        raise BatchMismatchError(f"batch {document.get('batch_id')}: " + "; ".join(problems))
    return columns


def _problems(name: str, column: Column) -> list[str]:
    dtype, ragged = FIELDS.get(name, (None, None))
    if dtype is None:
        return []
    found = column.values.dtype.name if isinstance(column, RaggedArray) else column.dtype.name
    problems = [] if found == dtype else [f"{name} has dtype {found}, the contract says {dtype}"]
    if isinstance(column, RaggedArray) != ragged:
        problems.append(f"{name} must have {'one array' if ragged else 'one value'} per sample")
    return problems
