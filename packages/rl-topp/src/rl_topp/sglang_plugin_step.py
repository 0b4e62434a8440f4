"""The kept sets of one decode step on their way from the device to the host.

A step travels in one int32 array `packed`, a row per row of the batch: `[count | bits of the
log-prob | first 64 ids]`, so there is one copy per step and it is small: 67 KB for 256 rows. A set
that is larger is read from the device when its row is read, with one more copy for all such rows of
the step.

Shape legend: B rows of the batch, C columns of `packed`, K ids of the prefix, W words of 32 ids.

Invariants: nothing here waits for the device until a row is read, and SGLang reads rows only after
the step's copy is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """What one step sampled and kept, on the device."""

    ids_B: Tensor
    """int32 [B]: the sampled ids."""
    packed_BC: Tensor
    """int32 [B, C]."""
    prefix_BK: Tensor
    """integer [B, K]: ids in descending order of probability; a set is its row's first `count` ids."""
    wide_BW: Tensor | None = None
    """int32 [B, W]: of rows whose first id in `packed_BC` is `WIDE`, bit j of word w says whether id 32 w + j is kept. None: there are no such rows."""


class StepRows:
    """What was recorded for the rows of one step; read with `row(i)`.

    Example: for a batch of two, the second without a filter, `row(0)` is `([17, 4], -0.47)` and
    `row(1)` is `(None, -3.1)`.
    """

    __slots__ = ("_host", "_larger", "_log_probs", "_packed", "_prefix", "_recorded", "_wide")

    def __init__(self, step: DrawnStep, recorded: Sequence[bool]) -> None:
        """Take a step; `recorded` says of each row whether it will be read."""
        self._packed = step.packed_BC
        self._prefix = step.prefix_BK
        self._wide = step.wide_BW
        self._recorded = recorded
        self._host: npt.NDArray[np.int32] | None = None
        self._log_probs: list[float] = []
        self._larger: dict[int, list[int]] = {}

    def start_copy(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Replace the device array by `copy(array)`, a host tensor that is filled asynchronously."""
        self._packed = copy(self._packed)

    def row(self, index: int) -> tuple[list[int] | None, float]:
        """Return kept ids, or None for the whole vocabulary, and the log-prob of the sampled id; of recorded rows only."""
        host = self._host if self._host is not None else self._decode()
        count = int(host[index, COUNT])
        if count == WHOLE_VOCABULARY:
            ids = None
        elif index in self._larger:
            ids = self._larger[index]
        else:
            ids = host[index, IDS : IDS + count].tolist()
        return ids, self._log_probs[index]

    def _decode(self) -> npt.NDArray[np.int32]:
        """Bring everything to the host, once per step."""
        self._host = host = self._packed.cpu().numpy()
        self._log_probs = host[:, LOG_PROB].copy().view(np.float32).tolist()
        counts = np.where(self._recorded, host[:, COUNT], 0)
        is_wide = (counts > 0) & (host[:, IDS] == WIDE)
        for rows, source in (
            (np.flatnonzero(~is_wide & (counts > HEAD_SIZE)), self._prefix),
            (np.flatnonzero(is_wide), self._wide),
        ):
            if rows.size and source is not None:
                values = source[torch.from_numpy(rows).to(source.device)].cpu().numpy()
                found = (
                    [row[:count] for row, count in zip(values, counts[rows], strict=True)]
                    if source is self._prefix
                    else _ids_of_words(values)
                )
                self._larger |= {
                    int(row): ids.tolist() for row, ids in zip(rows, found, strict=True)
                }
        return host


def _ids_of_words(words_RW: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int64]]:
    """Return the ids whose bits are set, per row."""
    bits = np.unpackbits(words_RW.astype("<i4").view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row) for row in bits]


def empty_step(
    num_rows: int, prefix_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `ids_B`, `packed_BC` and `prefix_BK` to be filled."""
    return (
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.int32, device=device),
        torch.zeros(num_rows, prefix_size, dtype=torch.int64, device=device),
    )
