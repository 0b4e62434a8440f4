"""Which rows are scored how: decided once per call, on the host, from the status of each row.

Invariants: a row without a log-prob is in no list; a row's main score comes from exactly one of
`kept` and `unfiltered`; `dense` holds `unfiltered`, and every scored row when full scores are
wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_topp.nucleus import NucleusSet, NucleusStatus, OnTruncated

__all__ = ["RowKinds", "sort_rows"]


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
    return RowKinds(
        kept=np.flatnonzero(kept),
        unfiltered=np.flatnonzero(unfiltered),
        dense=np.flatnonzero(dense),
    )
