"""One scoring call: its kept sets, its shard, and which rows are scored how.

T rows of a call, V_local ids of a shard. Decided once per call, on the host, from the status of
each row; the same in forward and backward.

Invariants: a row without a log-prob is in no list; a row's main score comes from exactly one of
`kept` and `unfiltered`; `dense` holds `unfiltered`, and every scored row when full scores are
wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from rl_topp.nucleus import NucleusSet, NucleusStatus, OnTruncated
from rl_topp.torch.checks import check_rows, check_shard, check_targets
from rl_topp.torch.scores import NucleusScores

__all__ = ["Call", "RowKinds", "make_call", "sort_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKinds:
    """Row numbers, ascending, int64."""

    kept: npt.NDArray[np.int64]
    """Rows with a complete kept set (status 0)."""
    unfiltered: npt.NDArray[np.int64]
    """Rows whose score is the one over the vocabulary (status 1; status 3 under
    `on_truncated="full"`)."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Settings of one call, the same in forward and backward."""

    rows: NucleusSet
    """Kept sets of the T rows."""
    kinds: RowKinds
    vocab_start: int
    """First id of the shard."""
    num_local_ids: int
    """Ids of the vocabulary that the shard holds; what it holds beyond them is padding."""
    temperature: float
    """Divisor of the logits."""
    full_log_probs: bool
    entropy: bool
    full_entropy: bool
    tp_group: dist.ProcessGroup | None
    """Ranks that hold the other shards."""

    @property
    def num_kinds(self) -> int:
        """Kinds of score computed: 1, or 2 where a score over the vocabulary is wanted too."""
        return 1 + (self.full_log_probs or self.full_entropy)

    def scores(self, log_probs_KT: Tensor, entropy_KT: Tensor | None) -> NucleusScores:
        """Give computed scores their public names, and only those that were asked for."""
        return NucleusScores(
            log_probs=log_probs_KT[0],
            full_log_probs=log_probs_KT[1] if self.full_log_probs else None,
            entropy=entropy_KT[0] if self.entropy and entropy_KT is not None else None,
            full_entropy=entropy_KT[1] if self.full_entropy and entropy_KT is not None else None,
        )


def make_call(
    rows: NucleusSet,
    targets_T: Tensor,
    *,
    num_rows: int,
    shard_size: int,
    vocab_start: int,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
    on_truncated: OnTruncated,
    full_log_probs: bool,
    entropy: bool,
    full_entropy: bool,
) -> Call:
    """Check what every scoring function takes, and sort the rows.

    Args:
        rows: kept sets of the T rows.
        targets_T: integers [T].
        num_rows: T, of the logits or hidden states.
        shard_size: ids and padding that the shard holds.
        vocab_start: first id of the shard.
        tp_group: see `Call`.
        temperature: see `Call`.
        on_truncated: what a row with an incomplete set is worth.
        full_log_probs: whether log-probs over the vocabulary are wanted.
        entropy: whether the entropy over the kept set is wanted.
        full_entropy: whether the entropy over the vocabulary is wanted.

    Raises:
        NucleusError: something does not fit.
    """
    check_rows(rows, num_rows=num_rows, temperature=temperature)
    check_targets(targets_T, num_rows=len(rows))
    check_shard(rows, vocab_start=vocab_start, num_local_ids=shard_size, tp_group=tp_group)
    want_full = full_log_probs or full_entropy
    return Call(
        rows=rows,
        kinds=sort_rows(rows, on_truncated=on_truncated, want_full=want_full),
        vocab_start=vocab_start,
        num_local_ids=int(np.clip(rows.vocab_size - vocab_start, 0, shard_size)),
        temperature=float(temperature),
        full_log_probs=full_log_probs,
        entropy=entropy,
        full_entropy=full_entropy,
        tp_group=tp_group,
    )
