"""Index arrays from the host to where tensors live, without waiting for the device.

A copy from ordinary host memory makes the host wait until the device has finished all it was given
before; from page-locked memory it does not.

Axes: R listed rows, E entries, nnz kept ids.

Invariants: one copy per call, however many arrays; every tensor starts at a multiple of 16 bytes,
so that Triton sees aligned pointers in every call and compiles each kernel once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_topp.errors import NucleusError
from rl_topp.nucleus import NucleusSet

__all__ = ["UploadedRows", "upload", "upload_rows"]

_ALIGNED = 4
"""int32 elements in 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedRows:
    """Kept sets of R listed rows on the device, int32, of which entries are made."""

    ids: Tensor
    """[nnz]: all kept ids of the call."""
    rows_R: Tensor
    """[R]: the row of the call that each listed row is."""
    starts_R: Tensor
    """[R]: where each listed row's ids start in `ids`."""
    offsets_R1: Tensor
    """[R+1]: where each listed row's entries start: one more than its ids, the target in front."""
    num_entries: int
    """E, known on the host."""


def upload(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> tuple[Tensor, ...]:
    """Copy arrays of integers to `device`, as int32 tensors over one buffer.

    Args:
        arrays: one-dimensional, values within int32.
        device: where to.
    """
    begins = [0]
    for array in arrays:
        # Rounded up to whole multiples: -(-a // b) is the ceiling.
        begins.append(begins[-1] + -(-array.size // _ALIGNED) * _ALIGNED)
    packed = torch.empty(begins[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    view = packed.numpy()
    for begin, array in zip(begins, arrays, strict=False):
        view[begin : begin + array.size] = array
    there = packed.to(device, non_blocking=True)
    return tuple(
        there[begin : begin + array.size] for begin, array in zip(begins, arrays, strict=False)
    )


def upload_rows(
    rows: NucleusSet, listed_rows: npt.NDArray[np.int64], device: torch.device
) -> UploadedRows:
    """Copy the kept sets of `listed_rows` to `device`.

    Args:
        rows: kept sets of the call's T rows.
        listed_rows: int64 [R], ascending; each has status 0.
        device: where to.

    Raises:
        NucleusError: 2**31 entries or more in one call.
    """
    if rows.ids.size + listed_rows.size > np.iinfo(np.int32).max:
        raise NucleusError(
            f"{rows.ids.size} kept ids in one call are more than int32 indices count; split the"
            " micro-batch"
        )
    starts = rows.offsets[listed_rows]
    offsets = np.zeros(listed_rows.size + 1, np.int64)
    np.cumsum(rows.offsets[listed_rows + 1] - starts + 1, out=offsets[1:])
    ids, rows_R, starts_R, offsets_R1 = upload((rows.ids, listed_rows, starts, offsets), device)
    return UploadedRows(
        ids=ids,
        rows_R=rows_R,
        starts_R=starts_R,
        offsets_R1=offsets_R1,
        num_entries=int(offsets[-1]),
    )
