"""What every scoring call takes, checked before any number is computed. T rows of a call.

Invariants: whatever does not fit is one `NucleusError` that lists all problems; nothing here reads
a tensor's values, so no check waits for the device.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_topp.errors import NucleusError
from rl_topp.nucleus import NucleusSet
from rl_topp.validation import check_count

__all__ = ["check_rows", "check_shard", "check_targets", "check_tensors"]

_TARGET_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensors(**tensors: object) -> None:
    """Check that each named argument is a tensor that holds numbers, all on one device."""
    NucleusError.raise_where(
        {
            f"{name} must be a torch tensor, got {type(value).__name__}": not isinstance(
                value, Tensor
            )
            for name, value in tensors.items()
        }
    )
    devices = {name: value.device for name, value in tensors.items() if isinstance(value, Tensor)}
    where = f"{', '.join(devices)} lie on {', '.join(map(str, devices.values()))}"
    if len(set(devices.values())) > 1:
        raise NucleusError(f"{where}; expected one device")
    if "meta" in {device.type for device in devices.values()}:
        raise NucleusError(f"{where}, where there are no numbers to score")


def check_targets(targets_T: Tensor, *, num_rows: int) -> None:
    """Check that `targets_T` names one id per row: int64, int32, int16, int8 or uint8 [num_rows]."""
    is_flat = targets_T.dim() == 1
    NucleusError.raise_where(
        {
            f"targets must be integers ({', '.join(map(str, _TARGET_DTYPES))}), got"
            f" {targets_T.dtype}": targets_T.dtype not in _TARGET_DTYPES,
            f"targets must have shape [T], got {list(targets_T.shape)}": not is_flat,
            f"got {targets_T.numel()} targets for {num_rows} rows": (
                is_flat and targets_T.numel() != num_rows
            ),
        }
    )


def check_rows(rows: NucleusSet, *, num_rows: int, temperature: float) -> None:
    """Check the kept sets of a call and how they are scored."""
    if not isinstance(rows, NucleusSet):
        raise NucleusError(
            f"rows must be a NucleusSet, got {type(rows).__name__}; see NucleusSet.from_lists and"
            " rl_topp.align_rows"
        )
    NucleusError.raise_where(
        {
            f"got kept sets of {len(rows)} rows for {num_rows} rows of logits or hidden states;"
            " align them with rl_topp.align_rows": len(rows) != num_rows,
            f"temperature must be positive and finite, a plain number, got {temperature!r}; greedy"
            " sampling has kept sets of one id, score it at temperature 1": not _is_positive(
                temperature
            ),
        }
    )


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
        and 0.0 < float(value) < math.inf
    )


def check_shard(
    rows: NucleusSet, *, vocab_start: int, num_local_ids: int, tp_group: dist.ProcessGroup | None
) -> None:
    """Check where a vocabulary shard lies; without a group it must hold every id.

    With a group, that its shards hold every id once is up to the caller: checking it would cost a
    collective.
    """
    check_count(vocab_start, "vocab_start")
    if tp_group is None and (vocab_start > 0 or num_local_ids < rows.vocab_size):
        raise NucleusError(
            f"this shard holds the ids [{vocab_start}, {vocab_start + num_local_ids}) of a"
            f" vocabulary of {rows.vocab_size}; pass the tp_group whose ranks hold the others"
        )
