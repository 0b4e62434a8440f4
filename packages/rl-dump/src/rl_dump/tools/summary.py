"""Which numbers describe a dump, or several: per field count, range, mean, what is not finite.

Invariant, matched by a test in `tests/unit/test_summary.py`: response-aligned fields are counted
over trained tokens only, once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_dump.columns.ragged import RaggedArray
from rl_dump.errors import DumpError
from rl_dump.reader import Dump, open_dump
from rl_dump.tools.token_statistics import log_prob_gap, mean_of, nucleus_sizes, trained_tokens

__all__ = ["BatchSummary", "FieldSummary", "summary", "trend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSummary:
    """The values of one field in numbers.

    Example: log-probs [-1, -3, nan] give count 3, minimum -3, maximum -1, mean -2, num_non_finite
    1.
    """

    name: str
    """The field, or `log_prob_gap` and `kept_set_size`, which follow from several."""
    count: int
    """Values counted: trained tokens for response-aligned fields, else all values."""
    minimum: float | None
    """Smallest finite value; None if there is none."""
    maximum: float | None
    """Largest finite value; None if there is none."""
    mean: float | None
    """Mean of the finite values, summed in float64; None if there is none."""
    num_non_finite: int
    """Values that are NaN or infinite."""
    num_missing: int
    """Samples without a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """One batch in numbers."""

    batch_id: int | str
    """The batch counter, or a word."""
    path: str
    """The file."""
    num_samples: int
    """Samples in the dump."""
    num_dropped: int
    """Samples listed as dropped."""
    fields: tuple[FieldSummary, ...]
    """Every field of numbers."""

    def field(self, name: str) -> FieldSummary | None:
        """Return one field's summary, None if the dump has no such field."""
        return next((entry for entry in self.fields if entry.name == name), None)


def summary(dump: Dump) -> BatchSummary:
    """Summarise a dump; reads every column of numbers once.

    Raises:
        DumpError: a column is damaged.
    """
    trained = trained_tokens(dump)
    fields = []
    for name, field in dump.fields.items():
        if field.kind not in {"scalar", "ragged"}:
            continue
        column = dump.column(name)
        aligned = field.response_aligned and isinstance(column, RaggedArray) and trained is not None
        fields.append(_summarise(name, column, trained if aligned else None))
    for name, derived in (
        ("log_prob_gap", log_prob_gap(dump)),
        ("kept_set_size", nucleus_sizes(dump)),
    ):
        if derived is not None:
            fields.append(_summarise(name, derived, trained))
    return BatchSummary(
        batch_id=dump.batch_id,
        path=str(dump.path),
        num_samples=dump.num_samples,
        num_dropped=len(dump.dropped),
        fields=tuple(fields),
    )


def trend(paths: Iterable[str | os.PathLike[str]]) -> list[BatchSummary]:
    """Summarise several batches, in the order of their batch ids (numbers first, then words).

    Raises:
        DumpError: a file cannot be read, or the dumps are of different contracts.
    """
    found = []
    contracts = set()
    for path in paths:
        with open_dump(path) as dump:
            found.append(summary(dump))
            contracts.add(dump.contract)
    if len(contracts) > 1:
        raise DumpError(
            f"dumps of different contracts: {', '.join(sorted(contracts))}; give the train dumps or"
            " the rollout dumps of a run"
        )
    return sorted(found, key=lambda batch: (isinstance(batch.batch_id, str), batch.batch_id))


def _summarise(
    name: str, column: NDArray[Any] | RaggedArray | list[Any], chosen: NDArray[np.bool_] | None
) -> FieldSummary:
    missing = 0
    if isinstance(column, list):
        present = [np.asarray(item).reshape(-1) for item in column if item is not None]
        missing = len(column) - len(present)
        values: NDArray[Any] = np.concatenate(present) if present else np.zeros(0)
    else:
        values = column.values if isinstance(column, RaggedArray) else column
    if chosen is not None and len(chosen) == len(values):
        values = values[chosen]
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return FieldSummary(
        name=name,
        count=int(values.size),
        minimum=float(finite.min()) if finite.size else None,
        maximum=float(finite.max()) if finite.size else None,
        mean=mean_of(finite) if finite.size else None,
        num_non_finite=int(values.size - finite.size),
        num_missing=missing,
    )
