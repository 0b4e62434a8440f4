"""The kept sets as a mask over the vocabulary: for reference and small cases.

Axes: T rows, V_local ids.

Invariant: equals `reference.keep_mask` restricted to the shard.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rl_topp.nucleus import NucleusSet, NucleusStatus, OnTruncated
from rl_topp.torch.call import check_rows, check_targets, check_tensors
from rl_topp.torch.entries import build_entries
from rl_topp.validation import check_count

__all__ = ["build_keep_mask"]


def build_keep_mask(
    targets_T: Tensor,
    rows: NucleusSet,
    *,
    num_local_ids: int | None = None,
    vocab_start: int = 0,
    on_truncated: OnTruncated = "mask",
) -> Tensor:
    """Return bool [T, V_local]: the support that each row is normalised over.

    Status 0: its ids and its target. Status 1, and status 3 under `on_truncated="full"`: the
    vocabulary. Otherwise nothing. It costs T * V_local bytes, which the scoring functions never
    spend.

    Args:
        targets_T: integers [T]; its device is the mask's.
        rows: kept sets of T rows.
        num_local_ids: width of the shard, V_local; None = the vocabulary. Columns beyond
            `rows.vocab_size` are False.
        vocab_start: first id of the shard.
        on_truncated: see `NucleusSet.scored_mask`.

    Raises:
        NucleusError: lengths that differ, targets other than integers [T], a shard that begins or
            ends below 0, an unknown `on_truncated`.
    """
    check_tensors(targets=targets_T)
    check_rows(rows, num_rows=targets_T.numel(), temperature=1.0)
    check_targets(targets_T, num_rows=len(rows))
    width = rows.vocab_size if num_local_ids is None else num_local_ids
    check_count(width, "num_local_ids")
    check_count(vocab_start, "vocab_start")
    held = int(np.clip(rows.vocab_size - vocab_start, 0, width))
    has_nucleus = rows.status == NucleusStatus.KEPT
    unfiltered = np.flatnonzero(rows.scored_mask(on_truncated=on_truncated) & ~has_nucleus)
    entries = build_entries(
        rows, np.flatnonzero(has_nucleus), targets_T, vocab_start=vocab_start, num_local_ids=held
    )
    mask = torch.zeros(targets_T.numel(), width, dtype=torch.bool, device=targets_T.device)
    valid = entries.ids_E >= 0
    mask[entries.call_rows_E[valid], entries.ids_E[valid]] = True
    mask[torch.from_numpy(unfiltered).to(targets_T.device), :held] = True
    return mask
