"""What every scoring call takes, checked before any number is computed.

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
from rl_topp.validation import is_integer

__all__ = ["check_rows", "check_shard", "check_targets", "check_tensors"]

_TARGET_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensors(**tensors: object) -> None:
    """Check that each named argument is a tensor that holds numbers, and that all lie on one device."""
    others = [
        f"{name} must be a torch tensor, got {type(value).__name__}"
        for name, value in tensors.items()
        if not isinstance(value, Tensor)
    ]
    NucleusError.raise_if(others)
    devices = {name: value.device for name, value in tensors.items() if isinstance(value, Tensor)}
    where = f"{', '.join(devices)} lie on {', '.join(map(str, devices.values()))}"
    if len(set(devices.values())) > 1:
        raise NucleusError(f"{where}; expected one device")
    if "meta" in {device.type for device in devices.values()}:
        raise NucleusError(f"{where}, where there are no numbers to score")


def check_targets(targets_T: Tensor, *, num_rows: int) -> None:
    """Check that `targets_T` names one id per row: int64, int32, int16, int8 or uint8 [num_rows]."""
    problems = []
    if targets_T.dtype not in _TARGET_DTYPES:
        problems.append(
            f"targets must be integers ({', '.join(map(str, _TARGET_DTYPES))}), got"
            f" {targets_T.dtype}"
        )
    if targets_T.dim() != 1:
        problems.append(f"targets must have shape [T], got {list(targets_T.shape)}")
    elif targets_T.shape[0] != num_rows:
        problems.append(f"got {targets_T.shape[0]} targets for {num_rows} rows")
    NucleusError.raise_if(problems)


def check_rows(rows: NucleusSet, *, num_rows: int, temperature: float, on_truncated: str) -> None:
    """Check the kept sets of a call and how they are scored."""
    if not isinstance(rows, NucleusSet):
        raise NucleusError(
            f"rows must be a NucleusSet, got {type(rows).__name__}; see NucleusSet.from_lists and"
            " rl_topp.align_rows"
        )
    problems = []
    if len(rows) != num_rows:
        problems.append(
            f"got kept sets of {len(rows)} rows for {num_rows} rows of logits or hidden states;"
            " align them with rl_topp.align_rows"
        )
    if not _is_positive(temperature):
        problems.append(
            f"temperature must be positive and finite, a plain number, got {temperature!r}; greedy"
            " sampling has kept sets of one id, score it at temperature 1"
        )
    if on_truncated not in ("mask", "full"):
        problems.append(f"on_truncated must be 'mask' or 'full', got {on_truncated!r}")
    NucleusError.raise_if(problems)


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
        and 0.0 < float(value) < math.inf
    )


def check_shard(
    rows: NucleusSet, *, vocab_start: int, num_local_ids: int, tp_group: dist.ProcessGroup | None
) -> None:
    """Check where a vocabulary shard lies; without a group it must hold every id, since nobody else
    adds the rest.

    With a group, that its shards hold every id once is up to the caller: checking it would cost a
    collective.
    """
    if not is_integer(vocab_start) or vocab_start < 0:
        raise NucleusError(f"vocab_start must be an integer of at least 0, got {vocab_start!r}")
    if tp_group is None and (vocab_start > 0 or num_local_ids < rows.vocab_size):
        raise NucleusError(
            f"this shard holds the ids [{vocab_start}, {vocab_start + num_local_ids}) of a"
            f" vocabulary of {rows.vocab_size}; pass the tp_group whose ranks hold the others"
        )
