"""The kept sets of one decode step on their way from the device to the host.

A step travels in one int32 array `packed`, a row per row of the batch: `[count | bits of the
log-prob | first 64 ids]`, so there is one copy per step and it is small: 67 KB for 256 rows. A set
that is larger is read from the device when its row is read, with one more copy for all such rows of
the step.

Axes: B rows of the batch, R some of them, C columns of `packed`, K prefix ids, W words of 32 ids.

Invariants: nothing here waits for the device until a row is read, and SGLang reads rows only after
the step's copy is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "COUNT",
    "HEAD_SIZE",
    "IDS",
    "LOG_PROB",
    "NUM_COLUMNS",
    "WHOLE_VOCABULARY",
    "WIDE",
    "DrawnStep",
    "SetPlace",
    "StepRows",
    "empty_step",
]

COUNT, LOG_PROB, IDS = 0, 1, 2
"""Columns of `packed`: the set's size, its log-prob's bits, its first id."""

HEAD_SIZE = 64
"""Ids of a set that travel with the step.

Sets of language models at top_p 0.95 have 5 ids in the mean.
"""

NUM_COLUMNS = IDS + HEAD_SIZE

WHOLE_VOCABULARY = -1
"""Count of a row without a filter: no ids are listed."""

WIDE = -1
"""First id of a row whose set is in `DrawnStep.wide_BW`."""


class SetPlace(IntEnum):
    """The place where the ids of a row's set are read."""

    NOWHERE = 0
    """Nowhere: the row has no filter, its set is the vocabulary."""
    HEAD = 1
    """In `DrawnStep.packed_BC`: the set fits there, as nearly all do."""
    PREFIX = 2
    """In `DrawnStep.prefix_BK`: the first `count` ids."""
    WORDS = 3
    """In `DrawnStep.wide_BW`: the bits that are set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """Sampled ids and kept sets of one step, on the device."""

    ids_B: Tensor
    """int32 [B]: the sampled ids."""
    packed_BC: Tensor
    """int32 [B, C]."""
    prefix_BK: Tensor
    """integer [B, K]: ids in descending order of probability; a set is the first `count` ids."""
    wide_BW: Tensor | None = None
    """int32 [B, W]: bit j of word w says whether the id 32 w + j is kept.

    It counts for rows whose first id in `packed_BC` is `WIDE`; None where there are no such rows.
    """


class StepRows:
    """Records of the rows of one step; read with `row(i)`.

    Example: for a batch of two, the second without a filter, `row(0)` is `([17, 4], -0.47)` and
    `row(1)` is `(None, -3.1)`.
    """

    __slots__ = ("_host", "_log_probs", "_outside_head", "_recorded", "_step")

    def __init__(self, step: DrawnStep, recorded: Sequence[bool]) -> None:
        """Take a step; `recorded` says of each row whether it will be read."""
        self._step = step
        self._recorded = recorded
        self._host: npt.NDArray[np.int32] | None = None
        self._log_probs: list[float] = []
        self._outside_head: dict[int, list[int] | None] = {}

    def start_copy(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Replace the device array by `copy(array)`, a host tensor filled asynchronously."""
        self._step = replace(self._step, packed_BC=copy(self._step.packed_BC))

    def row(self, index: int) -> tuple[list[int] | None, float]:
        """Return a recorded row's kept ids and the log-prob of its sampled id.

        The ids are None for the whole vocabulary.
        """
        host_BC = self._host if self._host is not None else self._decode()
        head = host_BC[index, IDS : IDS + int(host_BC[index, COUNT])]
        ids = self._outside_head[index] if index in self._outside_head else head.tolist()
        return ids, self._log_probs[index]

    def _decode(self) -> npt.NDArray[np.int32]:
        """Bring everything to the host, once per step."""
        self._host = host_BC = self._step.packed_BC.cpu().numpy()
        self._log_probs = host_BC[:, LOG_PROB].copy().view(np.float32).tolist()
        places_B = np.where(self._recorded, _places(host_BC), SetPlace.HEAD)
        for place in (SetPlace.NOWHERE, SetPlace.PREFIX, SetPlace.WORDS):
            rows_R = np.flatnonzero(places_B == place)
            if rows_R.size:  # One copy for all rows of a place, and none where there are none.
                sets = self._read(place, rows_R, host_BC[rows_R, COUNT])
                self._outside_head |= dict(zip(rows_R.tolist(), sets, strict=True))
        return host_BC

    def _read(
        self, place: SetPlace, rows_R: npt.NDArray[np.int64], counts_R: npt.NDArray[np.int32]
    ) -> list[list[int] | None]:
        """Return the sets of some rows that are read at `place`."""
        if place is SetPlace.NOWHERE:
            return [None] * rows_R.size
        source = self._step.prefix_BK if place is SetPlace.PREFIX else self._step.wide_BW
        assert source is not None, "a row is marked as wide only by who fills the words"
        values = source[torch.from_numpy(rows_R).to(source.device)].cpu().numpy()
        if place is SetPlace.PREFIX:
            return [ids[:count].tolist() for ids, count in zip(values, counts_R, strict=True)]
        # Little-endian bytes, little-endian bits: so bit j of word w becomes column 32 w + j.
        bits = np.unpackbits(values.astype("<i4").view(np.uint8), axis=1, bitorder="little")
        return [np.flatnonzero(row).tolist() for row in bits]


def _places(packed_BC: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the `SetPlace` of each row, [B]; the first condition that holds decides."""
    counts_B = packed_BC[:, COUNT]
    is_wide = (counts_B > 0) & (packed_BC[:, IDS] == WIDE)
    return np.select(
        [counts_B == WHOLE_VOCABULARY, is_wide, counts_B > HEAD_SIZE],
        [SetPlace.NOWHERE, SetPlace.WORDS, SetPlace.PREFIX],
        SetPlace.HEAD,
    )


def empty_step(
    num_rows: int, prefix_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `ids_B`, `packed_BC` and `prefix_BK` to be filled."""
    return (
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.int32, device=device),
        torch.zeros(num_rows, prefix_size, dtype=torch.int64, device=device),
    )
