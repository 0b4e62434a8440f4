"""Kept sets as a flat list of (row, id) entries on the device: what sparse scoring works on.

Axes: T rows of a call, R rows listed, E entries of these.

Invariants: each row's first entry is its target, so the sampled id is in its set whatever was
recorded; a kept id equal to the target appears once; entries that another vocabulary shard holds
have id -1 and count nowhere; sizes are known on the host, so building waits for no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_topp.nucleus import NucleusSet
from rl_topp.torch.upload import upload_rows

__all__ = ["Entries", "build_entries", "segment_statistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """E entries of R rows: int64 from `build_entries`, int32 from the Triton kernels."""

    rows_R: Tensor
    """[R]: the row of the call that each listed row is."""
    offsets_R1: Tensor
    """[R+1]: listed row r owns entries `offsets_R1[r]:offsets_R1[r + 1]`, its target first."""
    call_rows_E: Tensor
    """[E]: the row of the call of each entry."""
    ids_E: Tensor
    """[E]: id relative to this shard's first, or -1 when the entry counts nowhere.

    That is where another shard holds the id, or it is the target again.
    """

    @property
    def segments_E(self) -> Tensor:
        """The listed row of each entry, [E]."""
        return _segments(self.offsets_R1, self.ids_E.numel())

    @property
    def is_target_E(self) -> Tensor:
        """Whether the entry is its row's target, bool [E]."""
        # Not `mask[...] = True`: that copies the value from the host and waits for the device.
        return torch.zeros_like(self.ids_E, dtype=torch.bool).index_fill_(
            0, self.offsets_R1[:-1], True
        )


def build_entries(
    rows: NucleusSet,
    listed_rows: npt.NDArray[np.int64],
    targets_T: Tensor,
    *,
    vocab_start: int,
    num_local_ids: int,
) -> Entries:
    """List the entries of `listed_rows`.

    Args:
        rows: kept sets of the call's T rows.
        listed_rows: int64 [R], ascending; each has status 0.
        targets_T: integers [T], on the device where the entries shall live.
        vocab_start: first id of this shard.
        num_local_ids: number of ids of this shard.
    """
    lists = upload_rows(rows, listed_rows, targets_T.device)
    rows_R, starts_R, offsets_R1 = (
        array.long() for array in (lists.rows_R, lists.starts_R, lists.offsets_R1)
    )
    segments_E = _segments(offsets_R1, lists.num_entries)
    # Where each entry's id lies in `ids`; a row's first entry, its target, points one too low and
    # is overwritten.
    places_E = (
        torch.arange(lists.num_entries, device=rows_R.device)
        + (starts_R - offsets_R1[:-1] - 1)[segments_E]
    )
    ids_E = lists.ids[places_E.clamp_(min=0)].long()
    targets_R = targets_T[rows_R].long()
    ids_E.masked_fill_(ids_E == targets_R[segments_E], -1)
    ids_E[offsets_R1[:-1]] = targets_R
    ids_E -= vocab_start
    ids_E.masked_fill_((ids_E < 0) | (ids_E >= num_local_ids), -1)
    return Entries(
        rows_R=rows_R, offsets_R1=offsets_R1, call_rows_E=rows_R[segments_E], ids_E=ids_E
    )


def _segments(offsets_R1: Tensor, num_entries: int) -> Tensor:
    # With the size named, the device is not asked for it.
    return torch.repeat_interleave(offsets_R1.diff(), output_size=num_entries)


def segment_statistics(entries: Entries, z_E: Tensor) -> Tensor:
    """Return the statistics [4, R] of `scores` over this shard's entries.

    Args:
        entries: E entries of R rows.
        z_E: logit / temperature per entry, -inf where the id is -1.
    """
    if entries.rows_R.numel() == 0:
        return z_E.new_zeros(4, 0)
    highest = _reduce(z_E, "max", entries, initial=-torch.inf)
    # -inf - -inf would be NaN: a row without any id of this shard has mass 0 instead.
    distance = (z_E - highest[entries.segments_E]).masked_fill_(z_E == -torch.inf, -torch.inf)
    weight = torch.exp(distance)
    # In this order, and not -inf * 0: an id of probability 0 adds 0 to the spread.
    spread = distance.mul_(weight).masked_fill_(weight == 0, 0.0)
    return torch.stack(
        [
            highest,
            z_E[entries.offsets_R1[:-1]],
            _reduce(weight, "sum", entries, initial=0.0),
            _reduce(spread, "sum", entries, initial=0.0),
        ]
    )


def _reduce(values_E: Tensor, how: str, entries: Entries, *, initial: float) -> Tensor:
    return torch.segment_reduce(
        values_E, how, offsets=entries.offsets_R1, initial=initial, unsafe=True
    )
