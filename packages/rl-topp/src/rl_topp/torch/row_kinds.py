"""Which rows are scored how: decided once per call, on the host, from the status of each row.

Layer: torch side, no tensors. Invariants: a row without a log-prob is in no list; a row's main score comes from exactly one of `kept` and `unfiltered`;
`dense` holds `unfiltered`, and every scored row when full scores are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_topp.errors import NucleusError
from rl_topp.nucleus import NucleusSet, NucleusStatus, OnTruncated

__all__ = ["RowKinds", "check_rows", "sort_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKinds:
    """Row numbers, ascending, int64."""

    kept: npt.NDArray[np.int64]
    """Rows with a complete kept set (status 0)."""
    unfiltered: npt.NDArray[np.int64]
    """Rows whose score is the one over the vocabulary (status 1; status 3 under `on_truncated="full"`)."""
    dense: npt.NDArray[np.int64]
    """Rows that need the whole vocabulary."""


def sort_rows(rows: NucleusSet, *, on_truncated: OnTruncated, want_full: bool) -> RowKinds:
    """Sort the rows of a call by status."""
    kept = rows.status == NucleusStatus.KEPT
    unfiltered = rows.scored_mask(on_truncated=on_truncated) & ~kept
    dense = rows.status != NucleusStatus.NOT_SAMPLED if want_full else unfiltered
    return RowKinds(kept=np.flatnonzero(kept), unfiltered=np.flatnonzero(unfiltered), dense=np.flatnonzero(dense))


def check_rows(rows: NucleusSet, *, num_rows: int, num_targets: int, temperature: float, on_truncated: str) -> None:
    """Check what every scoring call takes; raise a `NucleusError` that lists all problems."""
    problems = []
    if len(rows) != num_rows:
        problems.append(
            f"got kept sets of {len(rows)} rows for {num_rows} rows of logits or hidden states; align them with rl_topp.align_rows"
        )
    if num_targets != num_rows:
        problems.append(f"got {num_targets} targets for {num_rows} rows")
    if not temperature > 0.0:
        problems.append(
            f"temperature must be positive, got {temperature}; greedy sampling has kept sets of one id, score it at temperature 1"
        )
    if on_truncated not in ("mask", "full"):
        problems.append(f"on_truncated must be 'mask' or 'full', got {on_truncated!r}")
    NucleusError.raise_if(problems)
