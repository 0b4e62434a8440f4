"""The kept sets of one decode step on their way from the device to the host. Layer: engine; imports torch, not SGLang.

All of a step travels in one int32 buffer, `[counts B | bits of the log-probs B | ids of row 0, row 1, ...]`, so there is one copy per step.

Invariants: nothing here waits for the device until a row is read, and SGLang reads rows only after the step's copy is done.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

__all__ = ["WHOLE_VOCABULARY", "StepRows", "pack"]

WHOLE_VOCABULARY = -1
"""Count of a row without a filter: no ids are listed."""


class StepRows:
    """What was recorded for the rows of one step; read with `row(i)`.

    Example: for a batch of two, the second without a filter, `row(0)` is `([17, 4], -0.47)` and `row(1)` is `(None, -3.1)`.
    """

    __slots__ = ("_ids", "_log_probs", "_num_rows", "_offsets", "_packed")

    def __init__(self, packed: Tensor, num_rows: int) -> None:
        """Take a buffer made by `pack`; it may still be on the device."""
        self._packed = packed
        self._num_rows = num_rows
        self._offsets: list[int] | None = None
        self._ids: list[int] = []
        self._log_probs: list[float] = []

    def start_copy(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Replace the device buffer by `copy(buffer)`, a host tensor that is filled asynchronously."""
        self._packed = copy(self._packed)

    def row(self, index: int) -> tuple[list[int] | None, float]:
        """Return kept ids, or None for the whole vocabulary, and the log-prob of the sampled id."""
        if self._offsets is None:
            self._decode()
        offsets = self._offsets or []
        start, stop = offsets[2 * index], offsets[2 * index + 1]
        ids = None if start == WHOLE_VOCABULARY else self._ids[start:stop]
        return ids, self._log_probs[index]

    def _decode(self) -> None:
        """Turn the buffer into Python lists, once per step."""
        buffer = self._packed.cpu().numpy()
        counts = buffer[: self._num_rows].astype(np.int64)
        stops = np.cumsum(np.maximum(counts, 0))
        starts = np.where(counts == WHOLE_VOCABULARY, WHOLE_VOCABULARY, stops - counts)
        self._log_probs = buffer[self._num_rows : 2 * self._num_rows].view(np.float32).tolist()
        self._ids = buffer[2 * self._num_rows :].tolist()
        self._offsets = np.stack([starts, stops], axis=1).ravel().tolist()


def pack(counts_B: Tensor, log_probs_B: Tensor, ids_N: Tensor) -> Tensor:
    """Return the buffer of one step, int32 [2 B + N].

    Args:
        counts_B: integer [B]; `WHOLE_VOCABULARY` for a row that lists no ids.
        log_probs_B: float32 [B], nats.
        ids_N: integer [N], the ids of all rows one after the other.
    """
    return torch.cat([counts_B.to(torch.int32), log_probs_B.to(torch.float32).view(torch.int32), ids_N.to(torch.int32)])
